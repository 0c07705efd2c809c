"""What a decode step launches per layer, counted on the real launchers and the real ops; nothing runs on the device."""

from collections import Counter
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from twins import TWINS, twin
from weights import make_weight

pytest.importorskip("triton", reason="triton is not installed")
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from nybble.kernels import launch, linear  # noqa: E402
from nybble.kernels.attention import CacheShape  # noqa: E402
from nybble.kernels.attention.paged import PagedAttention, StepBuffers  # noqa: E402
from nybble.kernels.linear import skinny  # noqa: E402
from nybble.kernels.target import Target  # noqa: E402
from nybble.service.models import Batch, load, read_config  # noqa: E402

CPU = torch.device("cpu")
TARGETS = {
    "gfx1151": Target("rocm", "gfx1151", "", 40, 65536),
    "gfx1201": Target("rocm", "gfx1201", "", 64, 65536),
    "sm_90": Target("cuda", "sm_90", "", 132, 232448),
}
# aten ops that move no data: views and allocations.
FREE = {
    *(
        "view",
        "_unsafe_view",
        "unsqueeze",
        "squeeze",
        "select",
        "slice",
        "narrow",
        "transpose",
        "t",
        "expand",
    ),
    *("reshape", "as_strided", "unbind", "alias", "detach", "permute", "split", "chunk", "unflatten"),
    *("empty", "new_empty", "empty_like", "empty_strided", "_to_copy"),
}


class Trace(TorchDispatchMode):
    """names: kernels and aten ops, in order."""

    def __init__(self):
        super().__init__()
        self.names = []
        self.dependent = []  # of each Triton launch

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, name = func.name().split("::")
        if namespace != "nybble" and name.split(".")[0] not in FREE:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Wide:
    """A WeightSource of a Qwen3 wide enough for its GEMMs to be split along K."""

    RAW = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 64,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }

    def expect(self, modules):
        pass

    def tensor(self, name):
        return torch.ones(
            (64, 1024) if "embed" in name else 128 if "q_norm" in name or "k_norm" in name else 1024
        )

    def linear(self, module, n, k):
        return torch.zeros(n, k) if module == "lm_head" else make_weight(n, k, 128, True)

    def bias(self, module):
        return None

    def has_saved(self, layer):
        return False

    def has(self, module):
        return True


def trace_of(monkeypatch, name, arch, rows, layers):
    target = TARGETS[arch]
    _, source, raw = (None, Wide(), Wide.RAW) if name == "wide" else twin(name, symmetric=False)
    config = read_config(
        raw | {"num_hidden_layers": layers, "layer_types": (raw.get("layer_types") or [])[:layers]}
    )
    attention = PagedAttention()
    monkeypatch.setattr(linear, "detect", lambda device: target)
    monkeypatch.setattr(launch, "target_of", lambda device: target)
    model = load(config, source, attention, torch.float16, CPU, config.default_positions)
    shape = CacheShape(layers, 64, 16, config.kv_heads, config.head_dim, torch.float16)
    attention.allocate(shape, CPU)
    buffers = StepBuffers(rows, rows, 8, 16, CPU)
    batch = Batch(*buffers.tokens(rows), (), None, buffers.plan(rows, rows, 1))
    trace = Trace()

    def csrc(weight, x, bias, gate=None):
        trace.names.append("skinny_w4a16")
        return x.new_empty(x.shape[0], weight.n // (2 if gate else 1))

    def run(self, *args, **kwargs):
        trace.names.append(self.fn.__name__)
        trace.dependent.append((bool(kwargs.get("DEPENDENT")), bool(kwargs.get("launch_pdl"))))

    monkeypatch.setattr(skinny, "apply", csrc)
    patches = [mock.patch.object(kind, "run", run) for kind in (InterpretedFunction, JITFunction)]
    with patches[0], patches[1], torch.inference_mode(), trace:
        model.forward(batch)
    # Launched as one that waits and compiled to wait, or neither.
    assert set(trace.dependent) == {(arch == "sm_90", arch == "sm_90")}
    return trace.names


def per_layer(monkeypatch, name, arch, rows):
    """name -> launches of one layer: what two layers more add, halved."""
    one, three = (Counter(trace_of(monkeypatch, name, arch, rows, layers)) for layers in (1, 3))
    added = three - one
    assert all(count % 2 == 0 for count in added.values()), added
    return Counter({launched: count // 2 for launched, count in added.items()})


@pytest.mark.parametrize("rows", [1, 4, 16, 24, 64])
@pytest.mark.parametrize("arch", TARGETS)
def test_a_decode_layer_is_at_most_nine_launches(monkeypatch, arch, rows):
    names = per_layer(monkeypatch, "wide", arch, rows)
    assert names.total() <= 9, names
    assert sum(count for n, count in names.items() if "w4a16" in n) == 4, names
    assert names["paged_attention_kernel"] == names["norm_rope_write_kernel"] == 1
    assert names["add_rms_norm_kernel"] == 2
    assert not [n for n in names if n.startswith("aten")], names


@pytest.mark.parametrize("name", TWINS)
def test_no_architecture_needs_more(monkeypatch, name):
    one, three = (trace_of(monkeypatch, name, "gfx1151", 2, layers) for layers in (1, 3))
    assert len(three) - len(one) <= 2 * 9, three
