/* The functions of libcuda and libamdhip64 that kernels/native/driver.py calls, with the signatures of their headers.
   They do nothing but remember what they were given, for the test to look at. No libc: it is built without headers. */

typedef unsigned long size_t;

enum { MAX_BYTES = 256, REFUSED_SHARED_BYTES = 200 << 10 };

struct Seen {
  void* function;
  unsigned grid[3], threads[3], shared_bytes;
  void *stream, *parameters;
  unsigned char arguments[MAX_BYTES];
  size_t argument_bytes;
  int dependent, loads, depth, current, allowed_bytes;
};

struct Seen seen;
int fail_with;

static int launch(void* function, const unsigned* shape, void* stream, void* parameters, void** extra, void* end) {
  seen.function = function;
  for (int i = 0; i < 3; i++) {
    seen.grid[i] = shape[i];
    seen.threads[i] = shape[3 + i];
  }
  seen.shared_bytes = shape[6];
  seen.stream = stream;
  seen.parameters = parameters;
  seen.argument_bytes = 0;
  if (extra) {
    if (extra[0] != (void*)1 || extra[2] != (void*)2 || extra[4] != end) return 1;
    seen.argument_bytes = *(size_t*)extra[3];
    if (seen.argument_bytes > MAX_BYTES) return 1;
    for (size_t i = 0; i < seen.argument_bytes; i++) seen.arguments[i] = ((unsigned char*)extra[1])[i];
  }
  return fail_with;
}

#define SHAPE {gx, gy, gz, tx, ty, tz, shared}

int cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned tx, unsigned ty, unsigned tz, unsigned shared,
                   void* stream, void** parameters, void** extra) {
  unsigned shape[] = SHAPE;
  seen.dependent = 0;
  return launch(f, shape, stream, parameters, extra, 0);
}

int hipModuleLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned tx, unsigned ty, unsigned tz,
                          unsigned shared, void* stream, void** parameters, void** extra) {
  unsigned shape[] = SHAPE;
  return launch(f, shape, stream, parameters, extra, (void*)3);
}

/* CUlaunchAttribute and CUlaunchConfig of cuda.h. */
typedef struct {
  int id;
  char pad[8 - sizeof(int)];
  union {
    char pad[64];
    int programmatic_stream_serialization_allowed;
  } value;
} Attribute;

typedef struct {
  unsigned gx, gy, gz, tx, ty, tz, shared;
  void* stream;
  Attribute* attributes;
  unsigned attribute_count;
} Config;

int cuLaunchKernelEx(const Config* c, void* f, void** parameters, void** extra) {
  unsigned shape[] = {c->gx, c->gy, c->gz, c->tx, c->ty, c->tz, c->shared};
  seen.dependent = 0;
  for (unsigned i = 0; i < c->attribute_count; i++)
    if (c->attributes[i].id == 6) seen.dependent = c->attributes[i].value.programmatic_stream_serialization_allowed;
  return launch(f, shape, c->stream, parameters, extra, 0);
}

/* One module: the image's first byte is its handle, the name's first letter is added for a function. */
static int load(void** module, const void* image) {
  seen.loads++;
  *module = (void*)(size_t)(1000 + *(const unsigned char*)image);
  return *(const unsigned char*)image == '!' ? 200 : 0;
}

static int find(void** function, void* module, const char* name) {
  *function = (void*)((size_t)module * 1000 + (unsigned char)name[0]);
  return name[0] == '?' ? 500 : 0;
}

int cuModuleLoadData(void** module, const void* image) { return seen.depth == 1 ? load(module, image) : 201; }
int cuModuleGetFunction(void** function, void* module, const char* name) { return find(function, module, name); }
int hipModuleLoadData(void** module, const void* image) { return seen.current == 1 ? load(module, image) : 201; }
int hipModuleGetFunction(void** function, void* module, const char* name) { return find(function, module, name); }

int cuDeviceGet(int* device, int index) { return *device = index, 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = (void*)(size_t)(77 + device), 0; }
int cuCtxPushCurrent_v2(void* context) { return seen.depth++, context == (void*)78 ? 0 : 201; }
int cuCtxPopCurrent_v2(void** context) { return seen.depth--, *context = (void*)78, 0; }
int hipGetDevice(int* device) { return *device = seen.current, 0; }
int hipSetDevice(int device) { return seen.current = device, 0; }

int cuFuncSetAttribute(void* function, int attribute, int value) {
  if (attribute != 8 || value > REFUSED_SHARED_BYTES) return 1;
  return seen.allowed_bytes = value, 0;
}

static int attribute(int* value, int number) { return *value = 10 * number, 0; }
int cuFuncGetAttribute(int* value, int number, void* function) { return attribute(value, number); }
int hipFuncGetAttribute(int* value, int number, void* function) { return attribute(value, number); }

int cuGetErrorString(int status, const char** text) { return *text = status == 1 ? "invalid argument" : "bad image", 0; }
const char* hipGetErrorString(int status) { return status == 1 ? "invalid argument" : "bad image"; }
