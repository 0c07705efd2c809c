// Runs one wave of RDNA machine code: a table maps each instruction to a compiled handler or to one of the
// native implementations below, written from AMD's RDNA3 and RDNA4 instruction set documents.
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <xmmintrin.h>
typedef void (*F)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);
typedef struct {
  F fn;
  uint8_t g[6];
  uint8_t n, flags;
  uint64_t count;
  uint32_t size, w0, w1, w2;
  uint64_t alt;
} E; /* flags: 1 barrier, 2 skip, 4 MUBUF gfx11, 8 VBUFFER gfx12 */
/* raw buffer loads/stores (tinygrad's RDNA decoder has none): structured by hand from the RDNA3/RDNA4 ISA
 * documents */
static uint32_t rs(uint32_t* sg, unsigned r) { return r == 124 ? 0 : sg[r]; }
static void do_buf(E* e, uint32_t* sg, uint32_t* vg) {
  unsigned op, vdata, vaddr, srs, so, offen, idxen;
  int64_t off;
  if (e->flags & 4) {
    op = (e->w0 >> 18) & 255;
    off = e->w0 & 0xfff;
    vaddr = e->w1 & 255;
    vdata = (e->w1 >> 8) & 255;
    srs = ((e->w1 >> 16) & 31) * 4;
    offen = (e->w1 >> 22) & 1;
    idxen = (e->w1 >> 23) & 1;
    so = e->w1 >> 24;
  } else {
    op = (e->w0 >> 14) & 255;
    so = e->w0 & 127;
    vdata = e->w1 & 255;
    srs = (e->w1 >> 9) & 511;
    offen = (e->w1 >> 30) & 1;
    idxen = (e->w1 >> 31) & 1;
    vaddr = e->w2 & 255;
    off = ((int32_t)e->w2) >> 8;
  }
  int ret = e->flags & 4 ? (e->w0 >> 14) & 1 : (e->w1 >> 20) & 1;
  uint64_t base = ((uint64_t)(sg[srs + 1] & 0xffff) << 32) | sg[srs];
  uint32_t stride = (sg[srs + 1] >> 16) & 0x3fff, nrec = sg[srs + 2];
  uint64_t soff = rs(sg, so);
  uint32_t ex = sg[126];
  for (int l = 0; l < 32; l++) {
    if (!(ex >> l & 1)) continue;
    uint32_t idx = idxen ? vg[vaddr * 32 + l] : 0, vo = offen ? vg[(vaddr + (idxen ? 1 : 0)) * 32 + l] : 0;
    uint64_t o = (uint64_t)vo + (uint64_t)off;
    unsigned nb, st = 0;
    switch (op) {
      case 16:
      case 17:
      case 30:
      case 33:
      case 31:
      case 34:
        nb = 1;
        break;
      case 18:
      case 19:
      case 32:
      case 35:
        nb = 2;
        break;
      case 20:
        nb = 4;
        break;
      case 21:
        nb = 8;
        break;
      case 22:
        nb = 12;
        break;
      case 23:
        nb = 16;
        break;
      case 51:
      case 53:
      case 54:
      case 56:
      case 57:
      case 58:
      case 59:
      case 60:
      case 61:
      case 62:
      case 86:
        nb = 4;
        st = 2;
        break;
      case 24:
      case 36:
        nb = 1;
        st = 1;
        break;
      case 25:
      case 37:
        nb = 2;
        st = 1;
        break;
      case 26:
        nb = 4;
        st = 1;
        break;
      case 27:
        nb = 8;
        st = 1;
        break;
      case 28:
        nb = 12;
        st = 1;
        break;
      case 29:
        nb = 16;
        st = 1;
        break;
      default:
        __builtin_trap();
    }
    uint64_t full = base + soff + o + (uint64_t)idx * stride;
    for (unsigned b = 0; b < nb; b += (nb < 4 ? nb : 4)) {
      unsigned w = nb < 4 ? nb : 4;
      int oob = stride == 0 ? (o + soff + b + w > nrec)
                            : (idx >= nrec); /* raw: offset check against num_records bytes */
      uint8_t* p = (uint8_t*)(full + b);
      uint32_t* r = &vg[(vdata + b / 4) * 32 + l];
      if (st == 2) {
        if (oob) {
          if (ret) *r = 0;
          continue;
        }
        uint32_t o, n, d = *r;
        memcpy(&o, p, 4);
        n = o;
        float fo, fd;
        memcpy(&fo, &o, 4);
        memcpy(&fd, &d, 4);
        switch (op) {
          case 51:
            n = d;
            break;
          case 53:
            n = o + d;
            break;
          case 54:
            n = o - d;
            break;
          case 56:
            n = (int)o < (int)d ? o : d;
            break;
          case 57:
            n = o < d ? o : d;
            break;
          case 58:
            n = (int)o > (int)d ? o : d;
            break;
          case 59:
            n = o > d ? o : d;
            break;
          case 60:
            n = o & d;
            break;
          case 61:
            n = o | d;
            break;
          case 62:
            n = o ^ d;
            break;
          case 86:
            fo += fd;
            memcpy(&n, &fo, 4);
            break;
        }
        memcpy(p, &n, 4);
        if (ret) *r = o;
        continue;
      }
      if (st) {
        if (oob) continue;
        if (op == 36)
          *p = (*r >> 16);
        else if (op == 37) {
          uint16_t h = *r >> 16;
          memcpy(p, &h, 2);
        } else
          memcpy(p, r, w);
      } else {
        uint32_t v = 0;
        if (!oob) memcpy(&v, p, w);
        switch (op) {
          case 17:
            v = (int32_t)(int8_t)v;
            break;
          case 19:
            v = (int32_t)(int16_t)v;
            break;
          case 30:
          case 32:
            v = (*r & 0xffff0000u) | (v & 0xffff);
            break;
          case 31:
            v = (*r & 0xffff0000u) | ((uint16_t)(int16_t)(int8_t)v);
            break;
          case 33:
          case 35:
            v = (*r & 0xffff) | (v << 16);
            break;
          case 34:
            v = (*r & 0xffff) | ((uint32_t)(uint16_t)(int16_t)(int8_t)v << 16);
            break;
        }
        *r = v;
      }
    }
  }
}
static __thread sigjmp_buf jb;
static __thread int armed;
static __thread uint64_t fault_addr;
static void onsegv(int s, siginfo_t* i, void* u) {
  (void)u;
  if (armed) {
    fault_addr = (uint64_t)i->si_addr;
    siglongjmp(jb, 1);
  }
  signal(s, SIG_DFL);
}
/* DPP: put the swizzled src0 into a free VGPR, narrow EXEC, run the plain instruction kept at e->alt,
 * restore.  w0 = dpp word, w1 kind 0 dpp16 1 dpp8 2 dpp8+fi, w2 = temp | src0<<8 */
static void do_dpp(E* e, uint32_t* sg, uint32_t* vg, uint64_t* b, uint64_t pc) {
  uint32_t ex = sg[126], en = 0, d = e->w0, kind = e->w1, tmp = e->w2 & 255, src = (e->w2 >> 8) & 255, t[32];
  uint32_t ctrl = (d >> 8) & 0x1ff, fi = kind ? kind == 2 : (d >> 18) & 1, bc = kind ? 1 : (d >> 19) & 1,
           bank = kind ? 15 : (d >> 24) & 15, row = kind ? 15 : d >> 28;
  for (int l = 0; l < 32; l++) {
    int r = l & ~15, i = l & 15, s = l, ok = 1, n = ctrl & 15;
    if (kind)
      s = (l & ~7) | ((d >> (8 + 3 * (l & 7))) & 7);
    else if (ctrl < 0x100)
      s = (l & ~3) | ((ctrl >> (2 * (l & 3))) & 3);
    else if (ctrl < 0x110) {
      s = l + n;
      ok = i + n < 16;
    } else if (ctrl < 0x120) {
      s = l - n;
      ok = i >= n;
    } else if (ctrl < 0x130)
      s = r | ((i - n) & 15);
    else if (ctrl == 0x140)
      s = r | (15 - i);
    else if (ctrl == 0x141)
      s = (l & ~7) | (7 - (l & 7));
    else if (ctrl >= 0x150 && ctrl < 0x160)
      s = r | n;
    else if (ctrl >= 0x160 && ctrl < 0x170)
      s = r | (i ^ n);
    else
      __builtin_trap();
    int valid = ok && (fi || (ex >> s & 1));
    t[l] = valid ? vg[src * 32 + s] : 0;
    if ((row >> (l >> 4) & 1) && (bank >> (i >> 2) & 1) && (valid || bc)) en |= 1u << l;
  }
  memcpy(vg + tmp * 32, t, 128);
  sg[126] = ex & en;
  sg[256] = (uint32_t)e->alt;
  sg[257] = e->alt >> 32;
  e->fn(b[e->g[0]], b[e->g[1]], b[e->g[2]], b[e->g[3]], b[e->g[4]], b[e->g[5]]);
  if (!(e->flags & 32)) sg[126] = ex;
  pc += e->size;
  sg[256] = (uint32_t)pc;
  sg[257] = pc >> 32;
}
/* WMMA, wave32, from the ISA documents: exact integer, double-precision float sums rounded once */
static float h2f(uint16_t h) {
  _Float16 x;
  memcpy(&x, &h, 2);
  return (float)x;
}
static float b2f(uint16_t h) {
  uint32_t u = (uint32_t)h << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static float f8(uint8_t v, int bf) {
  int s = v >> 7, m, e;
  double r;
  if (bf) {
    e = (v >> 2) & 31;
    m = v & 3;
    if (e == 31) return m ? __builtin_nanf("") : (s ? -__builtin_inff() : __builtin_inff());
    r = e ? (4 + m) * __builtin_exp2(e - 17) : m * __builtin_exp2(-16);
  } else {
    e = (v >> 3) & 15;
    m = v & 7;
    if ((v & 127) == 127) return __builtin_nanf("");
    r = e ? (8 + m) * __builtin_exp2(e - 10) : m * __builtin_exp2(-9);
  }
  return s ? -r : r;
}
static uint64_t unrep;
static void do_wmma(E* e, uint32_t* sg, uint32_t* vg) {
  int r4 = !!(e->flags & 8), op = (e->w0 >> 16) & 127, vd = e->w0 & 255, s0 = e->w1 & 255,
      s1 = (e->w1 >> 9) & 255, s2 = (e->w1 >> 18) & 511, neg = e->w1 >> 29, clamp = (e->w0 >> 15) & 1,
      ohi = (e->w0 >> 13) & 1;
  int bits = op < 0x44                    ? 16
             : op == 0x44                 ? 8
             : (op == 0x45 || op == 0x4a) ? 4
                                          : 8,
      kk = op == 0x4a ? 32 : 16, isint = op == 0x44 || op == 0x45 || op == 0x4a,
      half = op == 0x42 || op == 0x43;
  int per = r4 ? kk / 2 : kk, nreg = per * bits / 32;
  static __thread double A[16][32], B[16][32];
  static __thread uint32_t out[8][32];
  for (int mtx = 0; mtx < 2; mtx++)
    for (int l = 0; l < 32; l++) {
      int sr = mtx ? s1 : s0;
      if (!r4 && l >= 16) {
        for (int j = 0; j < nreg; j++)
          if (vg[(sr + j) * 32 + l] != vg[(sr + j) * 32 + l - 16]) unrep++;
        continue;
      }
      for (int i = 0; i < per; i++) {
        int k = r4 ? (l >> 4) * per + i : i;
        uint32_t w = vg[(sr + i * bits / 32) * 32 + l] >> ((i * bits) & 31);
        double v;
        int sgn = (neg >> mtx) & 1;
        if (op == 0x40 || op == 0x42)
          v = h2f(w);
        else if (op == 0x41 || op == 0x43)
          v = b2f(w);
        else if (bits == 4)
          v = sgn ? (double)((int32_t)(w << 28) >> 28) : (w & 15);
        else if (isint)
          v = sgn ? (double)(int8_t)w : (uint8_t)w;
        else
          v = f8(w, mtx ? (op == 0x47 || op == 0x49) : (op == 0x48 || op == 0x49));
        (mtx ? B : A)[l & 15][k] = v;
      }
    }
  for (int i = 0; i < 8; i++)
    for (int l = 0; l < 32; l++) {
      int m = r4 ? 8 * (l >> 4) + i : 2 * i + (l >> 4), n = l & 15;
      double acc = 0;
      for (int k = 0; k < kk; k++) acc += A[m][k] * B[n][k];
      uint32_t c;
      if (s2 < 256) {
        c = s2 < 128 ? sg[s2] : sg[s2];
        if (half) {
          float f;
          memcpy(&f, &c, 4);
          if (s2 < 240 && c) __builtin_trap();
          c = 0;
          if (f != 0) __builtin_trap();
        }
      } else if (half)
        c = r4 ? (vg[(s2 - 256 + i / 2) * 32 + l] >> (16 * (i & 1))) & 0xffff
               : (vg[(s2 - 256 + i) * 32 + l] >> (16 * ohi)) & 0xffff;
      else
        c = vg[(s2 - 256 + i) * 32 + l];
      if (isint) {
        int64_t t = (int64_t)acc + (int32_t)c;
        if (clamp) t = t > 2147483647ll ? 2147483647ll : t < -2147483648ll ? -2147483648ll : t;
        out[i][l] = (uint32_t)t;
      } else if (op == 0x42) {
        _Float16 h = (_Float16)(float)(acc + h2f(c));
        uint16_t u;
        memcpy(&u, &h, 2);
        out[i][l] = u;
      } else if (op == 0x43) {
        float f = (float)(acc + b2f(c));
        uint32_t u;
        memcpy(&u, &f, 4);
        out[i][l] = ((u + 0x7fff + ((u >> 16) & 1)) >> 16) & 0xffff;
      } else {
        float f;
        memcpy(&f, &c, 4);
        f = (float)(acc + f);
        memcpy(&out[i][l], &f, 4);
      }
    }
  for (int i = 0; i < 8; i++)
    for (int l = 0; l < 32; l++) {
      if (!half)
        vg[(vd + i) * 32 + l] = out[i][l];
      else if (r4) {
        uint32_t* p = &vg[(vd + i / 2) * 32 + l];
        *p = (i & 1) ? (*p & 0xffff) | (out[i][l] << 16) : (*p & 0xffff0000u) | out[i][l];
      } else {
        uint32_t* p = &vg[(vd + i) * 32 + l];
        *p = ohi ? (*p & 0xffff) | (out[i][l] << 16) : (*p & 0xffff0000u) | out[i][l];
      }
    }
}
static void do_swz(E* e, uint32_t* sg, uint32_t* vg) {
  uint32_t o = e->w0 & 0xffff, t[32], ex = sg[126];
  int src = e->w1 & 255, vd = e->w1 >> 24;
  for (int l = 0; l < 32; l++) {
    int s;
    if ((o & 0x8000) && o < 0xc000)
      s = (l & ~3) | ((o >> (2 * (l & 3))) & 3);
    else if (o >= 0xc000 && o < 0xe000) {
      int n = (o >> 5) & 31, k = o & 31;
      if (o & 0x400) n = 32 - n;
      s = (l & k) | ((l + n) & ~k & 31);
    } else if (o >= 0xe000)
      __builtin_trap();
    else
      s = ((l & (o & 31)) | ((o >> 5) & 31)) ^ ((o >> 10) & 31);
    t[l] = (ex >> s & 1) ? vg[src * 32 + s] : 0;
  }
  for (int l = 0; l < 32; l++)
    if (ex >> l & 1) vg[vd * 32 + l] = t[l];
}
static uint64_t do_pc(E* e, uint32_t* sg, uint64_t pc) {
  int op = (e->w0 >> 8) & 255, d = (e->w0 >> 16) & 127, s = e->w0 & 255;
  uint64_t nx = pc + 4, t = ((uint64_t)sg[s + 1] << 32) | sg[s];
  if (op != 0x48) {
    sg[d] = (uint32_t)nx;
    sg[d + 1] = nx >> 32;
  }
  return op == 0x47 ? nx : t;
}
static void do_movrel(E* e, uint32_t* sg, uint32_t* vg) {
  int d = (e->w0 >> 17) & 255, s = e->w0 & 511, rels = ((e->w0 >> 9) & 255) == 0x43;
  uint32_t ex = sg[126], m0 = sg[125];
  if (s == 255 || (rels && s < 256)) __builtin_trap();
  if (rels)
    s += m0;
  else
    d += m0;
  if (d > 255 || s > 511) __builtin_trap();
  for (int l = 0; l < 32; l++)
    if (ex >> l & 1) vg[d * 32 + l] = s < 256 ? sg[s] : vg[(s - 256) * 32 + l];
}
/* ds_load_{u8,i8,u16}_d16[_hi]: tinygrad's handler overwrites the half that must be preserved */
static void do_dsd16(E* e, uint32_t* sg, uint32_t* vg, uint8_t* lds) {
  int op = (e->w0 >> 18) & 255, a = e->w1 & 255, d = e->w1 >> 24;
  uint32_t off = e->w0 & 0xffff, ex = sg[126];
  for (int l = 0; l < 32; l++)
    if (ex >> l & 1) {
      uint8_t* p = lds + (uint32_t)(vg[a * 32 + l] + off);
      uint32_t v;
      int hi = op & 1;
      switch (op) {
        case 0xa2:
        case 0xa3:
          v = *p;
          break;
        case 0xa4:
        case 0xa5:
          v = (uint16_t)(int16_t)(int8_t)*p;
          break;
        default: {
          uint16_t h;
          memcpy(&h, p, 2);
          v = h;
        }
      }
      uint32_t* r = &vg[d * 32 + l];
      *r = hi ? (*r & 0xffff) | (v << 16) : (*r & 0xffff0000u) | v;
    }
}
/* v_permlane16_b32, v_permlanex16_b32: 16 lane numbers in two scalar sources, which may be literals.
 * op_sel[0] reads inactive lanes too, op_sel[1] gives 0 where an inactive one may not be read. */
static uint32_t scalar(uint32_t* sg, uint32_t src, uint32_t literal) {
  if (src < 128) return sg[src];
  if (src <= 192) return src - 128;
  if (src <= 208) return -(int32_t)(src - 192);
  if (src == 255) return literal;
  __builtin_trap();
}
static void do_permlane(E* e, uint32_t* sg, uint32_t* vg) {
  uint32_t ex = sg[126], vd = e->w0 & 255, src = e->w1 & 255, old[32], cross = (e->w0 >> 16 & 1023) == 0x25c;
  uint64_t sel = scalar(sg, e->w1 >> 9 & 511, e->w2) | (uint64_t)scalar(sg, e->w1 >> 18 & 511, e->w2) << 32;
  memcpy(old, vg + src * 32, 128);
  for (int l = 0; l < 32; l++) {
    int from = ((l & 16) ^ (cross ? 16 : 0)) | (sel >> 4 * (l & 15) & 15);
    int readable = (e->w0 >> 11 & 1) || (ex >> from & 1);
    if ((ex >> l & 1) && (readable || (e->w0 >> 12 & 1))) vg[vd * 32 + l] = readable ? old[from] : 0;
  }
}
uint64_t get_unrep(void) {
  uint64_t u = unrep;
  unrep = 0;
  return u;
}
/* 0 end, 1 barrier, 2 needs compile, 3 step budget used, 4 memory fault, 5 pc outside the code */
int run_wave(E* tab, uint64_t base, uint64_t nbytes, uint32_t* sg, uint64_t* b, uint64_t steps,
             uint64_t* done, uint64_t* fault, int ftz) {
  struct sigaction sa, o1, o2;
  memset(&sa, 0, sizeof sa);
  sa.sa_sigaction = onsegv;
  sa.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &sa, &o1);
  sigaction(SIGBUS, &sa, &o2);
  unsigned mx = _mm_getcsr();
  volatile uint64_t k = 0;
  volatile int rc = 3;
  if (sigsetjmp(jb, 1) == 0) {
    armed = 1;
    _mm_setcsr((mx & ~0x8040u) | (ftz ? 0x8040u : 0));
    for (; k < steps;) {
      uint64_t pc = (uint64_t)sg[256] | ((uint64_t)sg[257] << 32);
      if (pc == ~0ull) {
        rc = 0;
        break;
      }
      uint64_t off = pc - base;
      if (off >= nbytes) {
        rc = 5;
        break;
      }
      E* e = tab + (off >> 2);
      if (!e->fn) {
        rc = 2;
        break;
      }
      if (e->flags & 16) {
        do_dpp(e, sg, (uint32_t*)b[1], b, pc);
        e->count++;
        k++;
        continue;
      }
      if (e->flags & 14) {
        if (e->n == 10)
          do_permlane(e, sg, (uint32_t*)b[1]);
        else if (e->n == 9)
          do_dsd16(e, sg, (uint32_t*)b[1], (uint8_t*)b[3]);
        else if (e->n == 8)
          do_movrel(e, sg, (uint32_t*)b[1]);
        else if (e->flags & 64)
          do_wmma(e, sg, (uint32_t*)b[1]);
        else if (e->flags & 128)
          do_swz(e, sg, (uint32_t*)b[1]);
        else if (e->flags & 12)
          do_buf(e, sg, (uint32_t*)b[1]);
        pc = e->n == 7 ? do_pc(e, sg, pc) : pc + e->size;
        sg[256] = (uint32_t)pc;
        sg[257] = pc >> 32;
        e->count++;
        k++;
        continue;
      }
      e->fn(b[e->g[0]], b[e->g[1]], b[e->g[2]], b[e->g[3]], b[e->g[4]], b[e->g[5]]);
      e->count++;
      k++;
      if (e->flags & 1) {
        rc = 1;
        break;
      }
    }
  } else {
    rc = 4;
    *fault = fault_addr;
  }
  armed = 0;
  _mm_setcsr(mx);
  *done = k;
  sigaction(SIGSEGV, &o1, 0);
  sigaction(SIGBUS, &o2, 0);
  return rc;
}
