"""AMD GPU code objects: ELF image, relocations, kernel descriptors and their msgpack metadata note."""

from __future__ import annotations

import dataclasses
import struct


def msgpack_loads(b: bytes):
    p = 0

    def take(n):
        nonlocal p
        r = b[p : p + n]
        p += n
        return r

    def u(f):
        return struct.unpack(">" + f, take(struct.calcsize(f)))[0]

    def one():
        c = take(1)[0]
        if c < 0x80:
            return c
        if c >= 0xE0:
            return c - 256
        if c < 0x90:
            return mp(c & 15)
        if c < 0xA0:
            return [one() for _ in range(c & 15)]
        if c < 0xC0:
            return take(c & 31).decode()
        if c == 0xC0:
            return None
        if c in (0xC2, 0xC3):
            return c == 0xC3
        if c in (0xC4, 0xC5, 0xC6):
            return take(u("BHI"[c - 0xC4]))
        if c == 0xCA:
            return u("f")
        if c == 0xCB:
            return u("d")
        if 0xCC <= c <= 0xCF:
            return u("BHIQ"[c - 0xCC])
        if 0xD0 <= c <= 0xD3:
            return u("bhiq"[c - 0xD0])
        if c in (0xD9, 0xDA, 0xDB):
            return take(u("BHI"[c - 0xD9])).decode()
        if c in (0xDC, 0xDD):
            return [one() for _ in range(u("HI"[c - 0xDC]))]
        if c in (0xDE, 0xDF):
            return mp(u("HI"[c - 0xDE]))
        raise ValueError(f"msgpack type {c:#x}")

    def mp(n):
        return {one(): one() for _ in range(n)}

    return one()


EF_MACH = {
    0x41: "gfx1100",
    0x46: "gfx1101",
    0x47: "gfx1102",
    0x44: "gfx1103",
    0x43: "gfx1150",
    0x4A: "gfx1151",
    0x55: "gfx1152",
    0x58: "gfx1153",
    0x48: "gfx1200",
    0x4E: "gfx1201",
}


@dataclasses.dataclass
class Kernel:
    name: str
    entry: int
    kd: bytes
    meta: dict
    group: int = 0
    private: int = 0
    kernarg: int = 0
    rsrc1: int = 0
    rsrc2: int = 0
    rsrc3: int = 0
    props: int = 0


class CodeObject:
    """Parses an amdgpu ELF; image = bytes laid out by p_vaddr (relocations are applied by load())."""

    def __init__(self, blob: bytes):
        self.blob = blob
        assert blob[:4] == b"\x7fELF" and blob[4] == 2, "not an ELF64"
        (_, _, _, _, phoff, shoff, flags, _, phes, phn, shes, shn, shstr) = struct.unpack_from(
            "<HHIQQQIHHHHHH", blob, 16
        )
        self.mach = EF_MACH.get(flags & 0xFF, f"mach_{flags & 0xFF:#x}")
        ph = [struct.unpack_from("<IIQQQQQQ", blob, phoff + i * phes) for i in range(phn)]
        assert ph, "no program headers: link the object first (ld.lld -shared)"
        self.size = max(v + msz for (t, fl, off, v, pa, fsz, msz, al) in ph if t == 1)
        self.image = bytearray(self.size)
        self.meta = {}
        for t, fl, off, v, pa, fsz, msz, al in ph:
            if t == 1:
                self.image[v : v + fsz] = blob[off : off + fsz]
            if t == 4:
                self._note(blob[off : off + fsz])
        sh = [struct.unpack_from("<IIQQQQIIQQ", blob, shoff + i * shes) for i in range(shn)]
        self.syms, self.relocs = {}, []
        for nm, typ, fl, addr, off, sz, link, info, al, es in sh:
            if typ in (2, 11):  # SYMTAB, DYNSYM
                st = sh[link][4]
                tab = []
                for k in range(sz // 24):
                    n, inf, oth, shx, val, ssz = struct.unpack_from("<IBBHQQ", blob, off + 24 * k)
                    s = blob[st + n : blob.index(b"\0", st + n)].decode()
                    tab.append((s, val, shx, ssz))
                    if shx:
                        self.syms[s] = (val, ssz)
            if typ == 4:  # RELA
                ltab = sh[link]
                for k in range(sz // 24):
                    ro, ri, ra = struct.unpack_from("<QQq", blob, off + 24 * k)
                    n, inf, oth, shx, val, ssz = (
                        struct.unpack_from("<IBBHQQ", blob, ltab[4] + 24 * (ri >> 32))
                        if ri >> 32
                        else (0,) * 6
                    )
                    self.relocs.append((ro, ri & 0xFFFFFFFF, val, ra))
        self.text = next(
            (
                (addr, sz)
                for (nm, typ, fl, addr, off, sz, *_) in sh
                if blob[sh[shstr][4] + nm :].split(b"\0", 1)[0] == b".text"
            ),
            (0, self.size),
        )

    def _note(self, d):
        p = 0
        while p + 12 <= len(d):
            ns, ds, ty = struct.unpack_from("<III", d, p)
            p += 12
            nm = d[p : p + ns].rstrip(b"\0")
            p += (ns + 3) & ~3
            if nm == b"AMDGPU" and ty == 32:
                self.meta = msgpack_loads(d[p : p + ds])
            p += (ds + 3) & ~3

    def load(self, base: int):
        """Relocated image for a load address."""
        im = bytearray(self.image)
        for ro, ty, sv, ad in self.relocs:
            if ty == 13:
                struct.pack_into("<Q", im, ro, (base + ad) & (2**64 - 1))  # RELATIVE64
            elif ty == 3:
                struct.pack_into("<Q", im, ro, (base + sv + ad) & (2**64 - 1))  # ABS64
            elif ty == 5:
                struct.pack_into("<q", im, ro, sv + ad - ro)  # REL64
            elif ty == 4:
                struct.pack_into("<i", im, ro, sv + ad - ro)  # REL32
            elif ty == 6:
                struct.pack_into("<I", im, ro, (base + sv + ad) & 0xFFFFFFFF)  # ABS32
            elif ty == 10:
                struct.pack_into("<I", im, ro, (sv + ad - ro) & 0xFFFFFFFF)  # REL32_LO
            elif ty == 11:
                struct.pack_into("<I", im, ro, ((sv + ad - ro) >> 32) & 0xFFFFFFFF)  # REL32_HI
            else:
                raise NotImplementedError(f"AMDGPU relocation type {ty}")
        return im

    def kernels(self):
        return [s[:-3] for s in self.syms if s.endswith(".kd")]

    def kernel(self, name: str | None = None) -> Kernel:
        ks = self.kernels()
        if name is None:
            assert len(ks) == 1, f"pick one of {ks}"
            name = ks[0]
        if name not in ks:
            c = [k for k in ks if name in k]
            assert len(c) == 1, f"{name!r} not in {ks}"
            name = c[0]
        off = self.syms[name + ".kd"][0]
        kd = bytes(self.image[off : off + 64])
        g, p, ka, _ = struct.unpack_from("<IIII", kd, 0)
        eo = struct.unpack_from("<q", kd, 16)[0]
        r3, r1, r2 = struct.unpack_from("<III", kd, 44)
        (props,) = struct.unpack_from("<H", kd, 56)
        meta = next((k for k in self.meta.get("amdhsa.kernels", []) if k[".symbol"] == name + ".kd"), {})
        return Kernel(name, off + eo, kd, meta, g, p, ka, r1, r2, r3, props)
