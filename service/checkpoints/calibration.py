"""How much each input column of a linear layer matters: the mean square of the activations it meets.

The 16-bit model runs once over a short text, one decoder layer in memory at a time: the model is built without
storage, and each layer's weights are read when its turn comes and dropped after it. transformers' own model code runs
it, so whatever the block does is done here too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from nybble.service.errors import CheckpointError

HEAD = "lm_head"
WINDOW = 512  # tokens per sequence
WITHOUT = "quantise without calibration (calibrate=False) for plain rounding"

# Written for this purpose: prose, dialogue, instructions, numbers, a table, code, a letter and a list, so that no
# one kind of text decides what counts as important.
TEXT = """\
The ferry left the old harbour a little after six, while the lamps along the quay were still burning. Most of the
passengers stayed below, where it was warm and smelled of coffee, but two of them went up to the deck and watched the
town grow small behind the wake. Neither had slept well. The older one had spent forty years repairing clocks and
could not leave a quiet room without listening for what was wrong with it; the younger had never seen the open sea.

"Does it always roll like this?" she asked.
"Only when the wind is from the west," he said. "Look at the gulls. If they sit on the water, it will be calm by noon."
"And if they don't?"
"Then we shall be late, and your aunt will have eaten all the soup."

How do plants make food? Plants use a process called photosynthesis. Leaves take in carbon dioxide from the air and
water from the soil. With the energy of sunlight, a green pigment named chlorophyll helps to turn these into sugar and
oxygen. The sugar feeds the plant; the oxygen is released. At night the process stops, because there is no light, but
respiration goes on all day long.

To bake a simple loaf, mix 500 g of flour, 7 g of dry yeast and 10 g of salt with 350 ml of lukewarm water. Knead the
dough for ten minutes, let it rise for 1 hour, shape it, and bake it at 220 degrees for about 35 minutes. It is done
when it sounds hollow underneath. Variations: replace a third of the flour with rye, or add walnuts and dried figs.

In 1869 a chemist arranged the known elements in order of weight and noticed that their properties repeat. He left gaps
for elements that nobody had found, and predicted how heavy they would be. Within twenty years three of them had been
discovered. A theory that forbids nothing explains nothing; his could have failed, and that is why people believed it.

| city      | population | area (km2) | founded |
|-----------|-----------:|-----------:|--------:|
| Northgate |    184,320 |       97.5 |    1642 |
| Millbrook |     52,071 |       31.2 |    1718 |
| Eastwater |  1,203,998 |      412.0 |     988 |

def moving_average(values, width):
    if width < 1 or width > len(values):
        raise ValueError(f"width must be between 1 and {len(values)}, got {width}")
    total = sum(values[:width])
    result = [total / width]
    for i in range(width, len(values)):
        total += values[i] - values[i - width]
        result.append(total / width)
    return result

Dear Dr. Okafor, thank you for your letter of 14 March. We regret that the instrument arrived damaged, and we will of
course replace it at no cost to you. Please keep the original packaging until our driver has collected it. The
warranty covers parts and labour for 24 months; it does not cover damage caused by use outside the stated limits. If
any provision of this agreement is held to be invalid, the remaining provisions shall continue in full force. Yours
sincerely, M. Lindqvist, Customer Service.

Solve for x: 3x + 7 = 22. Subtract 7 from both sides: 3x = 15. Divide by 3: x = 5. Check: 3 * 5 + 7 = 22, as required.
Next, a train that travels 180 kilometres in 2.5 hours has an average speed of 180 / 2.5 = 72 kilometres per hour.

Things to remember before a long walk in the mountains:
1. Tell someone where you are going and when you expect to return.
2. Carry more water than you think you need, a map, a whistle and a warm layer.
3. Turn back early if the weather changes. The summit will still be there next year.

The committee met on Tuesday to discuss the new library. Some members wanted a larger reading room; others argued that
the money would be better spent on longer opening hours and on a bus that could bring books to the villages. After two
hours nobody had changed his mind, but everyone had been heard, and they agreed to ask the people who would use it. As
the chairwoman put it, a library is not a building with books in it, but a promise that anyone may come in and learn.
"""


def text_tokens(folder: Path) -> torch.Tensor:
    """int64 [B, WINDOW]: the calibration text by the tokenizer of a folder, its rest left out.

    A text shorter than one window gives one shorter row. Raises CheckpointError when there is no usable tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        ids = AutoTokenizer.from_pretrained(str(folder)).encode(TEXT)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CheckpointError(
            f"{folder}: no usable tokenizer for calibration ({error}); {WITHOUT}"
        ) from error
    rows = len(ids) // WINDOW
    return torch.tensor(ids[: rows * WINDOW] if rows else ids).view(max(rows, 1), -1)


def importance(
    config: dict[str, Any],
    read: Callable[[str], torch.Tensor],
    modules: Collection[str],
    ids: torch.Tensor,
    on_tensor: Callable[[str], None],
) -> dict[str, torch.Tensor]:
    """Mean square of every input column, float32 [K], for each named linear module of the blocks and for HEAD.

    config: the 16-bit model's config.json. read(name) gives a tensor by its full name. ids [B, S] are run as one
    batch in float32. on_tensor(name) is called after each tensor read. Raises CheckpointError when transformers has
    no such model or a tensor is missing.
    """
    model = _skeleton(config)
    found: dict[str, torch.Tensor] = {}

    def load(module: torch.nn.Module, prefix: str) -> None:
        state = {}
        for name, expected in module.named_parameters():
            value = read(f"{prefix}.{name}")
            if value.shape != expected.shape:
                raise CheckpointError(
                    f"tensor {prefix}.{name}: given {list(value.shape)}, accepted {list(expected.shape)} by config.json: "
                    "the two do not belong together"
                )
            state[name] = value.float()
            on_tensor(f"{prefix}.{name}")
        module.load_state_dict(state, strict=False, assign=True)

    def observe(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            found[name] = args[0].reshape(-1, args[0].shape[-1]).float().square().mean(0)

        return hook

    def drop(module: torch.nn.Module, args: object, output: object) -> None:
        module.to("meta")

    layers = _decoder_layers(model)
    inside = {id(sub) for layer in layers.values() for sub in layer.modules()}
    for prefix, layer in layers.items():
        layer.register_forward_pre_hook(lambda module, args, prefix=prefix: load(module, prefix))
        layer.register_forward_hook(drop)
    for name, module in model.named_modules():
        if name in modules and isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(observe(name))
        elif (
            id(module) not in inside
            and not list(module.children())
            and list(module.parameters(recurse=False))
        ):
            if module is not model.get_output_embeddings():
                load(module, name)
    highest, vocabulary = int(ids.max()), model.get_input_embeddings().num_embeddings
    if highest >= vocabulary:
        raise CheckpointError(
            f"the tokenizer gives token {highest}, config.json's vocab_size is {vocabulary}: the two do not belong together"
        )
    with torch.inference_mode():
        hidden = model.base_model(ids, use_cache=False).last_hidden_state
    found[HEAD] = hidden.flatten(0, -2).square().mean(0)
    missing = sorted(set(modules) - set(found))
    if missing:
        raise CheckpointError(
            f"calibration never reached module {missing[0]} ({len(missing)} such); {WITHOUT}"
        )
    return found


def _skeleton(config: dict[str, Any]) -> Any:
    """transformers' model without storage, but with the buffers that its code computes from the config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        parsed = AutoConfig.for_model(**config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                parsed, dtype=torch.float32, attn_implementation="eager"
            ).eval()
    except Exception as error:  # transformers and its config checks raise whatever they like
        reason = " ".join(str(error).split())
        raise CheckpointError(f"transformers cannot build this model ({reason[:300]}); {WITHOUT}") from error
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            model.set_submodule(name, _with_buffers(name, module, parsed))
    return model


def _with_buffers(name: str, module: torch.nn.Module, config: Any) -> torch.nn.Module:
    scale = getattr(module, "scalar_embed_scale", None)
    if isinstance(module, torch.nn.Embedding) and scale is not None:  # Gemma's
        module.embed_scale = torch.tensor(scale)
        return module
    if "Rotary" not in type(module).__name__:
        raise CheckpointError(
            f"module {name} ({type(module).__name__}) holds buffers of unknown content; {WITHOUT}"
        )
    fresh: torch.nn.Module = type(module)(config=config)
    return fresh


def _decoder_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Full name -> decoder block."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and name.endswith("layers"):
            return {f"{name}.{i}": layer for i, layer in enumerate(module)}
    raise CheckpointError(f"{type(model).__name__} has no list of decoder layers; {WITHOUT}")
