"""Run RDNA3, RDNA3.5 and RDNA4 code objects on the CPU: instruction semantics from tinygrad's emulator, loading,
scheduling, guarded memory and several corrected instructions from here.

`run_kernel(code_object, name, grid, block, args)` runs real machine code instruction by instruction over numpy arrays.
Needs RDNA_TINYGRAD (a checkout of tinygrad/tinygrad with test/mockgpu) and clang-22, llvm-mc-22 on PATH. Wait counts and
hazards are not modelled; WMMA sums are exact, so no last-bit equality with hardware.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rdna_code_object import CodeObject, Kernel

TINYGRAD = os.environ.get("RDNA_TINYGRAD", "")
WORK = Path(tempfile.gettempdir()) / "nybble-rdna-emulator"
_DRIVER = Path(__file__).with_name("rdna_driver.c")


def _prepare() -> None:
    """Put `clang` (22) on PATH for tinygrad's handlers, and tinygrad on the import path."""
    tools = WORK / "bin"
    tools.mkdir(parents=True, exist_ok=True)
    compiler = shutil.which("clang-22")
    if not TINYGRAD or compiler is None:
        raise RuntimeError("the RDNA emulator needs RDNA_TINYGRAD and clang-22 on PATH")
    link = tools / "clang"
    if not link.exists():
        link.symlink_to(compiler)
    os.environ["PATH"] = f"{tools}:{os.environ.get('PATH', '')}"
    os.environ.setdefault("DEV", "CPU")
    os.environ.setdefault("CACHEDB", str(WORK / "tinygrad.db"))
    if TINYGRAD not in sys.path:
        sys.path.insert(0, TINYGRAD)


_prepare()


def _cdrv():
    h = hashlib.sha256(_DRIVER.read_bytes()).hexdigest()[:12]
    so = WORK / f"driver_{h}.so"
    if not so.exists():
        t = f"{so}.{os.getpid()}"
        subprocess.run(["clang", "-O2", "-mf16c", "-shared", "-fPIC", str(_DRIVER), "-o", t], check=True)
        os.replace(t, so)
    l = ctypes.CDLL(str(so))
    l.run_wave.restype = ctypes.c_int
    l.run_wave.argtypes = [
        ctypes.c_void_p,
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint64,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int,
    ]
    return l


class _Entry(ctypes.Structure):
    _fields_ = [
        ("fn", ctypes.c_void_p),
        ("g", ctypes.c_uint8 * 6),
        ("n", ctypes.c_uint8),
        ("flags", ctypes.c_uint8),
        ("count", ctypes.c_uint64),
        ("size", ctypes.c_uint32),
        ("w0", ctypes.c_uint32),
        ("w1", ctypes.c_uint32),
        ("w2", ctypes.c_uint32),
        ("alt", ctypes.c_uint64),
    ]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Region:
    """Anonymous memory followed and preceded by an inaccessible page; the data ends at the guard page (16-byte granularity)."""

    def __init__(self, nbytes, align=16, poison=0xFF, noreserve=False):
        self.n = max(nbytes, 1)
        body = (self.n + align - 1) // align * align
        pg = (body + 4095) & ~4095
        self.total = pg + 8192
        self.map = _libc.mmap(None, self.total, 0, 0x22 | (0x4000 if noreserve else 0), -1, 0)
        assert self.map and self.map != 2**64 - 1
        _libc.mprotect(self.map + 4096, pg, 3)
        self.addr = self.map + 4096 + pg - body
        if poison is not None:
            ctypes.memset(self.map + 4096, poison, pg)

    def write(self, b):
        ctypes.memmove(self.addr, b, len(b))

    def read(self, n=None):
        return ctypes.string_at(self.addr, n or self.n)

    def __del__(self):
        if getattr(self, "map", None):
            _libc.munmap(self.map, self.total)
            self.map = None


class Fault(RuntimeError):
    pass


@dataclasses.dataclass
class Result:
    outputs: list  # arrays after the run, same order as the pointer args (None for scalars)
    steps: int = 0  # wave-instructions executed
    compile_s: float = 0.0  # decode + instruction-handler compile time
    run_s: float = 0.0
    dyn: dict = dataclasses.field(default_factory=dict)  # mnemonic -> executed count (wave-instructions)
    kernel: Kernel | None = None
    mach: str = ""
    wmma_unreplicated: int = 0  # RDNA3 WMMA operand words that differ between lanes l and l+16 (must be 0)


_SZ = {"b": 1, "h": 2, "i": 4, "q": 8}


def run_kernel(
    hsaco: bytes,
    kernel_name,
    grid,
    block,
    args,
    *,
    lds_bytes=None,
    dynamic_lds=0,
    wave_order="fwd",
    quantum=0,
    seed=0,
    workgroups=None,
    lds_poison=0xFF,
    vgpr_poison=None,
    max_steps=200_000_000,
    flush_f32=None,
    verbose=False,
    arch=None,
) -> Result:
    """args: numpy arrays (copied in, and out into Result.outputs), python ints/floats, numpy scalars, None (null pointer).
    grid/block in workgroups / threads, 1 to 3 numbers.  lds_bytes: total LDS (Triton: compiled.metadata.shared).
    wave_order fwd|rev|rand and quantum=N (switch wave every N instructions) shake out missing barriers.
    workgroups: iterable of (x,y,z) to run only some.  flush_f32: None = as the kernel descriptor's FLOAT_DENORM_MODE_32 says."""
    from test.mockgpu.amd import emu

    co = CodeObject(hsaco)
    k = co.kernel(kernel_name)
    arch = arch or ("rdna4" if co.mach.startswith("gfx12") else "rdna3")
    if not k.props & 0x400:
        raise NotImplementedError("wave64 kernel: the emulator runs RDNA code as wave32 only")
    gx, gy, gz = (tuple(grid) + (1, 1, 1))[:3]
    lx, ly, lz = (tuple(block) + (1, 1, 1))[:3]
    nthr = lx * ly * lz
    # ---- code
    code = Region(co.size + 256, align=4096, poison=0)
    code.write(bytes(co.load(code.addr)))
    # ---- explicit args
    ka = Region(max(k.kernarg, 8) + 64, poison=0)
    kb = bytearray(max(k.kernarg, 8))
    keep, outs = [], []
    margs = k.meta.get(".args", [])
    expl = [a for a in margs if not a[".value_kind"].startswith("hidden_")]
    if len(args) > len(expl):
        raise ValueError(f"{len(args)} args given, kernel has {len(expl)}: {[a.get('.name') for a in expl]}")
    for i, a in enumerate(expl):
        off, sz, kind = a[".offset"], a[".size"], a[".value_kind"]
        if i >= len(args):  # Triton's global_scratch / profile_scratch: null
            outs.append(None)
            continue
        v = args[i]
        if (
            isinstance(v, np.ndarray)
            and v.ndim > 0
            or (hasattr(v, "numpy") and not isinstance(v, np.generic))
        ):
            v = np.ascontiguousarray(v if isinstance(v, np.ndarray) else v.numpy())
            assert kind in ("global_buffer", "dynamic_shared_pointer") or sz == 8, (
                f"arg {i} {a} is not a pointer"
            )
            r = Region(v.nbytes)
            r.write(v.tobytes())
            keep.append((r, v))
            outs.append((r, v.dtype, v.shape))
            struct.pack_into("<Q", kb, off, r.addr)
            continue
        outs.append(None)
        if v is None:
            struct.pack_into("<Q", kb, off, 0)
        elif isinstance(v, np.generic):
            kb[off : off + sz] = v.tobytes().ljust(sz, b"\0")[:sz]
        elif isinstance(v, bytes):
            kb[off : off + sz] = v.ljust(sz, b"\0")[:sz]
        elif isinstance(v, float):
            struct.pack_into({4: "<f", 8: "<d", 2: "<e"}[sz], kb, off, v)
        else:
            kb[off : off + sz] = (int(v) & ((1 << 8 * sz) - 1)).to_bytes(sz, "little")
    for a in margs:  # hidden args (code object v5)
        off, sz, kind = a[".offset"], a[".size"], a[".value_kind"]
        if not kind.startswith("hidden_"):
            continue
        m = re.match(r"hidden_(block_count|group_size|remainder|global_offset)_([xyz])$", kind)
        if m:
            d = "xyz".index(m[2])
            val = {
                "block_count": (gx, gy, gz)[d],
                "group_size": (lx, ly, lz)[d],
                "remainder": 0,
                "global_offset": 0,
            }[m[1]]
        elif kind == "hidden_grid_dims":
            val = 3 if gz > 1 or lz > 1 else 2 if gy > 1 or ly > 1 else 1
        elif kind == "hidden_dynamic_lds_size":
            val = dynamic_lds
        else:
            val = 0  # printf/hostcall/heap/queue pointers etc.
        kb[off : off + sz] = val.to_bytes(sz, "little")
    ka.write(bytes(kb))
    # ---- user SGPRs as the kernel descriptor asks
    ud = []
    p = k.props
    lds_total = lds_bytes if lds_bytes is not None else k.group + dynamic_lds
    pkt = Region(64, poison=0)
    pkt.write(
        struct.pack(
            "<HHHHHHIIIIIQQQQ",
            0,
            3,
            lx,
            ly,
            lz,
            0,
            gx * lx,
            gy * ly,
            gz * lz,
            k.private,
            lds_total,
            code.addr,
            ka.addr,
            0,
            0,
        )
    )
    q = lambda x: ud.extend([x & 0xFFFFFFFF, x >> 32])
    if p & 1:
        ud += [0, 0, 0, 0]
    if p & 2:
        q(pkt.addr)
    if p & 4:
        q(0)
    if p & 8:
        q(ka.addr)
    if p & 16:
        q(0)
    if p & 32:
        q(0)
    if p & 64:
        ud.append(k.private)
    pre = struct.unpack_from("<H", k.kd, 58)[0]
    if pre:
        raise NotImplementedError("kernarg preload")
    nus = (k.rsrc2 >> 1) & 31
    assert len(ud) <= nus, (
        f"user SGPRs {len(ud)} > descriptor {nus}"
    )  # gfx11 pads the count (UserSGPRInit16 workaround)
    # ---- LDS: 4 GiB of lazily mapped space, so that the emulator's dereference of an inactive lane's address stays harmless
    lds = Region(1 << 32, poison=None, noreserve=True, align=4096)
    lds_len = max(lds_total, 1)
    drv = _cdrv()
    tab = (_Entry * (co.size // 4 + 64))()
    ftz = (((k.rsrc1 >> 16) & 3) == 0) if flush_f32 is None else bool(flush_f32)
    res = Result([], kernel=k, mach=co.mach)
    names = {}
    side = Region(32 * (co.size // 4 + 64), poison=0)

    def compile_at(pc):
        t = time.perf_counter()
        w = struct.unpack("<3I", ctypes.string_at(pc, 12))
        e = tab[(pc - code.addr) // 4]
        if arch == "rdna3" and w[0] >> 26 == 0x38:  # MUBUF
            op = (w[0] >> 18) & 255
            if op in (0x2B, 0x2C) or op in _BUFOPS:
                _native(e, w, 8, 2 if op in (0x2B, 0x2C) else 4)
                names[(pc - code.addr) // 4] = _native_name(w, arch == "rdna4")
                return
        if arch == "rdna4" and w[0] >> 26 == 0x31:  # VBUFFER
            op = (w[0] >> 14) & 255
            if op in _BUFOPS:
                _native(e, w, 12, 8)
                names[(pc - code.addr) // 4] = _native_name(w, arch == "rdna4")
                return
        if (
            arch == "rdna4" and w[0] >> 24 == 0xEE and (w[0] >> 14) & 255 in (0x2B, 0x2C, 0x4F)
        ):  # global_inv / global_wb / global_wbinv
            _native(e, w, 12, 2)
            names[(pc - code.addr) // 4] = _native_name(w, arch == "rdna4")
            return
        r4 = arch == "rdna4"
        nm = lambda: names.__setitem__((pc - code.addr) // 4, _native_name(w, r4))
        if (
            w[0] >> 24 == 0xCC and 0x40 <= (op := (w[0] >> 16) & 127) < 0x60
        ):  # WMMA: our own (the emulator has no iu4/fp8, ignores signedness and modifiers)
            isint = op in (0x44, 0x45, 0x4A)
            bad = (
                op > (0x4A if r4 else 0x45)
                or ((w[0] >> 8) & 7)
                or (not isint and (w[1] >> 29))
                or (w[1] >> 31)
                or (not isint and w[0] >> 15 & 1)
            )
            if bad:
                raise Fault(f"WMMA form not handled: {dis(pc)}")
            _native(e, w, 8, 64 | 2 | (8 if r4 else 0))
            nm()
            return
        if w[0] >> 26 == 0x36 and (w[0] >> 18) & 255 == 0x35:
            _native(e, w, 8, 128 | 2)
            nm()
            return  # ds_swizzle_b32
        if w[0] >> 26 == 0x36 and (w[0] >> 18) & 255 in range(0xA2, 0xA8):
            _native(e, w, 8, 2)
            e.n = 9
            nm()
            return
        if w[0] >> 25 == 0x3F and (w[0] >> 9) & 255 in (0x42, 0x43):
            _native(e, w, 4, 2)
            e.n = 8
            nm()
            return  # v_movreld / v_movrels
        if w[0] >> 23 == 0x17D and (w[0] >> 8) & 255 in (0x47, 0x48, 0x49):  # s_getpc / s_setpc / s_swappc
            _native(e, w, 4, 2)
            e.n = 7
            nm()
            return
        dpp = _dpp_rewrite(w)
        try:
            a = pc
            if dpp:
                plain, size, dword, kind, src, is3 = dpp
                nv = k.meta.get(".vgpr_count", 256)
                tmp = nv if nv < 256 else None
                if tmp is None:
                    raise Fault("DPP needs one free VGPR, the kernel uses all 256")
                a = side.addr + 32 * len(names)
                enc = lambda t: ctypes.memmove(a, struct.pack("<3I", *plain(t)), 12)
                enc(tmp)
                i0 = emu.decode_inst(ctypes.string_at(a, 16), arch)
                if not is3 and i0.canonical_op_bits.get("s0") == 16:  # true16 e32: bit 7 picks the high half
                    if tmp > 127 or (dword >> 20 & 15 and not kind):
                        raise Fault("16-bit DPP with modifiers or a temp above v127: not handled")
                    enc(tmp | (src & 128))
                    src &= 127
            try:
                (prg, runtime), inst = emu._decode_at(a, arch)
            except Exception:
                if not co.mach.startswith("gfx115") or w[0] >> 30 != 2:
                    raise
                (prg, runtime), inst = emu._decode_at(
                    a, "rdna4"
                )  # RDNA3.5 scalar-float SALU ops share RDNA4's encodings
                if not type(inst).__name__.startswith("SOP"):
                    raise
        except Exception as ex:
            raise Fault(f"emulator cannot run pc+{pc - code.addr:#x} ({dis(pc)}): {ex}") from ex
        e = tab[(pc - code.addr) // 4]
        gl = list(prg.arg.globals)
        e.fn = runtime.addr
        e.n = len(gl)
        for j in range(6):
            e.g[j] = gl[j] if j < len(gl) else 0
        opn = emu._op_name(inst)
        if dpp:
            e.alt = a
            e.size = size
            e.w0 = dword
            e.w1 = kind
            e.w2 = tmp | src << 8
            e.flags = 16 | (32 if "CMPX" in opn else 0)
            names[(pc - code.addr) // 4] = opn + "_DPP"
            res.compile_s += time.perf_counter() - t
            return
        bar = opn.startswith("S_BARRIER") and "SIGNAL" not in opn
        e.flags = 1 if bar else 0
        names[(pc - code.addr) // 4] = opn
        res.compile_s += time.perf_counter() - t

    def dis(pc):
        w = struct.unpack("<4I", ctypes.string_at(pc, 16))
        try:
            r = subprocess.run(
                ["llvm-mc-22", "-disassemble", "-triple=amdgcn-amd-amdhsa", f"-mcpu={co.mach}"],
                text=True,
                capture_output=True,
                input=" ".join(f"0x{x:02x}" for x in struct.pack("<4I", *w)),
            )
            return next(
                (l.strip() for l in r.stdout.splitlines() if l.strip() and not l.strip().startswith(".")), "?"
            )
        except Exception:
            return "?"

    steps, fault = ctypes.c_uint64(), ctypes.c_uint64()
    rng = random.Random(seed)
    nw = (nthr + 31) // 32
    spw = max((k.private + 15) & ~15, 0)
    wgs = (
        list(workgroups)
        if workgroups is not None
        else [(x, y, z) for z in range(gz) for y in range(gy) for x in range(gx)]
    )
    pool = []
    r2 = k.rsrc2
    for ix, iy, iz in wgs:
        if lds_poison is not None:
            ctypes.memset(lds.addr, lds_poison, (lds_len + 4095) & ~4095)
        waves = []
        for w in range(nw):
            if w >= len(pool):
                pool.append(emu.WaveState(32, 32))
            st = _reinit(
                emu, pool[w], code.addr + k.entry, w * 32, nthr, lx, ly, lz, r2, spw, arch, ix, iy, iz, ud
            )
            scr = Region(spw * 32 + 64, poison=0xFF) if spw else None
            b = (ctypes.c_uint64 * 6)(
                st.sgpr_buf._buf.va_addr,
                st.vgpr_buf._buf.va_addr,
                0,
                lds.addr,
                scr.addr if scr else 0,
                st.vgpr_buf._buf.va_addr,
            )
            if vgpr_poison is not None:
                ctypes.memset(st.vgpr_buf._buf.va_addr + 128, vgpr_poison, 255 * 128)
            waves.append([st, b, "run", scr])
        while any(w[2] != "done" for w in waves):
            order = [i for i, w in enumerate(waves) if w[2] == "run"]
            if not order:  # everyone alive is at the barrier: release
                for w in waves:
                    if w[2] == "bar":
                        w[2] = "run"
                continue
            if wave_order == "rev":
                order.reverse()
            elif wave_order == "rand":
                rng.shuffle(order)
            for i in order:
                st, b, _, _ = waves[i]
                left = quantum or max_steps
                while True:
                    rc = drv.run_wave(
                        ctypes.addressof(tab),
                        code.addr,
                        co.size,
                        st.sgpr_buf._buf.va_addr,
                        ctypes.addressof(b),
                        left,
                        ctypes.byref(steps),
                        ctypes.byref(fault),
                        int(ftz),
                    )
                    res.steps += steps.value
                    left -= steps.value
                    if rc == 2:
                        compile_at(st.pc)
                        continue
                    break
                if rc == 0:
                    waves[i][2] = "done"
                elif rc == 1:
                    waves[i][2] = "bar"
                elif rc == 3:
                    if res.steps > max_steps:
                        raise Fault(f"step budget {max_steps} used up")
                elif rc == 4:
                    near = min(
                        ((abs(fault.value - r.addr), j) for j, (r, _) in enumerate(keep)), default=(0, -1)
                    )
                    rr = keep[near[1]][0] if keep else None
                    raise Fault(
                        f"memory fault at {fault.value:#x} by pc+{st.pc - code.addr:#x} ({dis(st.pc)}) wg {(ix, iy, iz)} wave {i}; "
                        f"nearest pointer arg #{near[1]} offset {fault.value - rr.addr if rr else 0} of {rr.n if rr else 0} bytes"
                    )
                else:
                    raise Fault(f"pc {st.pc:#x} left the code (code at {code.addr:#x}+{co.size:#x})")
    for r in outs:
        res.outputs.append(
            None
            if r is None
            else np.frombuffer(r[0].read(int(np.prod(r[2])) * r[1].itemsize), dtype=r[1]).reshape(r[2]).copy()
        )
    drv.get_unrep.restype = ctypes.c_uint64
    res.wmma_unreplicated = drv.get_unrep()
    res.dyn = {}
    for i, n in names.items():
        res.dyn[n] = res.dyn.get(n, 0) + tab[i].count
    return res


def _dpp_rewrite(w):
    """None, or (encoder of the same instruction without DPP given a src0 VGPR, size, dpp word, kind, src0 VGPR, is VOP3)"""
    K = {0xE9: 1, 0xEA: 2, 0xFA: 0}
    if w[0] >> 31 == 0:  # VOP1 / VOP2 / VOPC
        s0 = w[0] & 0x1FF
        if s0 not in K:
            return None
        kind, d = K[s0], w[1]
        mods = 0 if kind else d >> 20 & 15
        if not mods:
            return (lambda t: ((w[0] & ~0x1FF) | 0x100 | t, 0, 0)), 8, d, kind, d & 255, False
        top = w[0] >> 25
        vdst, s1 = (w[0] >> 17) & 255, (w[0] >> 9) & 255
        op = 0x180 + s1 if top == 0x3F else s1 if top == 0x3E else 0x100 + top
        if top == 0x3E:
            vdst, s1 = 106, 0  # VOPC: VCC; its source 1 is at [16:9] and its op at [24:17]
        if top == 0x3E:
            op, s1 = (w[0] >> 17) & 255, (w[0] >> 9) & 255
        src1 = 0 if top == 0x3F else (0x100 | s1)
        ab, ng = (mods >> 1 & 1) | (mods >> 3 & 1) << 1, (mods & 1) | (mods >> 2 & 1) << 1
        return (
            (lambda t: (0x35 << 26 | op << 16 | ab << 8 | vdst, 0x100 | t | src1 << 9 | ng << 29, 0)),
            8,
            d,
            kind,
            d & 255,
            False,
        )
    if w[0] >> 26 in (0x35, 0x33):  # VOP3 / VOP3P
        s0 = w[1] & 0x1FF
        if s0 not in K:
            return None
        return (lambda t: (w[0], (w[1] & ~0x1FF) | 0x100 | t, 0)), 12, w[2], K[s0], w[2] & 255, True
    return None


_BUF = [
    "LOAD_U8",
    "LOAD_I8",
    "LOAD_U16",
    "LOAD_I16",
    "LOAD_B32",
    "LOAD_B64",
    "LOAD_B96",
    "LOAD_B128",
    "STORE_B8",
    "STORE_B16",
    "STORE_B32",
    "STORE_B64",
    "STORE_B96",
    "STORE_B128",
    "LOAD_D16_U8",
    "LOAD_D16_I8",
    "LOAD_D16_B16",
    "LOAD_D16_HI_U8",
    "LOAD_D16_HI_I8",
    "LOAD_D16_HI_B16",
    "STORE_D16_HI_B8",
    "STORE_D16_HI_B16",
]
_ATM = {
    51: "SWAP_B32",
    53: "ADD_U32",
    54: "SUB_U32",
    56: "MIN_I32",
    57: "MIN_U32",
    58: "MAX_I32",
    59: "MAX_U32",
    60: "AND_B32",
    61: "OR_B32",
    62: "XOR_B32",
    86: "ADD_F32",
}
_BUFOPS = set(range(16, 38)) | set(_ATM)
_WM = [
    "F32_16X16X16_F16",
    "F32_16X16X16_BF16",
    "F16_16X16X16_F16",
    "BF16_16X16X16_BF16",
    "I32_16X16X16_IU8",
    "I32_16X16X16_IU4",
    "F32_16X16X16_FP8_FP8",
    "F32_16X16X16_FP8_BF8",
    "F32_16X16X16_BF8_FP8",
    "F32_16X16X16_BF8_BF8",
    "I32_16X16X32_IU4",
]


def _native_name(w, r4):
    if w[0] >> 24 == 0xCC:
        return "V_WMMA_" + _WM[(w[0] >> 16 & 127) - 0x40]
    if w[0] >> 26 == 0x36:
        return (
            "DS_SWIZZLE_B32"
            if w[0] >> 18 & 255 == 0x35
            else "DS_LOAD_"
            + ["U8_D16", "U8_D16_HI", "I8_D16", "I8_D16_HI", "U16_D16", "U16_D16_HI"][
                (w[0] >> 18 & 255) - 0xA2
            ]
        )
    if w[0] >> 23 == 0x17D:
        return {0x47: "S_GETPC_B64", 0x48: "S_SETPC_B64", 0x49: "S_SWAPPC_B64"}[w[0] >> 8 & 255]
    if w[0] >> 25 == 0x3F:
        return {0x42: "V_MOVRELD_B32", 0x43: "V_MOVRELS_B32"}[w[0] >> 9 & 255]
    if w[0] >> 24 == 0xEE:
        return "GLOBAL_CACHE_OP"
    op = (w[0] >> 14 if r4 else w[0] >> 18) & 255
    return (
        "BUFFER_CACHE_OP"
        if op in (0x2B, 0x2C)
        else "BUFFER_" + (_BUF[op - 16] if op < 38 else "ATOMIC_" + _ATM[op])
    )


def _native(e, w, size, flags):
    e.fn = 1
    e.flags = flags
    e.size = size
    e.w0, e.w1, e.w2 = w


def _reinit(emu, st, lib, w0, nthr, lx, ly, lz, r2, spw, arch, ix, iy, iz, ud):
    n = min(32, nthr - w0)
    ctypes.memset(st.vgpr_buf._buf.va_addr, 0, 256 * 32 * 4)
    ctypes.memset(st.sgpr_buf._buf.va_addr, 0, 128 * 4)
    s, v = st._sgpr_mv, st._vgpr_mv
    s[emu.EXEC_LO.offset] = (1 << n) - 1
    st.pc = lib
    for i, x in enumerate(ud):
        s[i] = x & 0xFFFFFFFF
    if arch == "rdna4":
        s[emu.ttmp[7].offset] = (iy & 0xFFFF) | ((iz & 0xFFFF) << 16)
        s[emu.ttmp[9].offset] = ix
        s[emu.ttmp[8].offset] = (
            w0 // 32
        ) << 25  # wave id in the workgroup (Triton/LLVM read it: s_bfe_u32 ttmp8, 0x50019)
    else:
        j = (r2 >> 1) & 31
        for bit, g in ((7, ix), (8, iy), (9, iz)):
            if r2 >> bit & 1:
                s[j] = g
                j += 1
    s[emu.SCC.offset] = 0
    s[emu.SCRATCH_STRIDE_IDX] = spw
    for lane in range(n):
        t = w0 + lane
        v[lane] = ((t // (lx * ly)) << 20) | (((t // lx) % ly) << 10) | (t % lx)
    return st
