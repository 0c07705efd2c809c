"""Plant faults in the kernels one at a time; each must turn its named tests red.

    python tests/mutations.py [NAME ...]

Every fault edits a copy of the package, never the working tree, and runs the tests named beside it against the copy.
Prints a table; exits 1 when a fault passes its tests, when what it fails fails without it, or when the code it edits is
no longer there.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in `file`, once; `tests` are pytest arguments that must then fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str


SKINNY, KN = "kernels/linear/triton_skinny.py", "kernels/linear/triton_kn.py"
LAYOUT = "kernels/skinny_layout.py"
SKINNY_TESTS, KN_TESTS = "tests/kernels/test_triton_skinny.py", "tests/kernels/test_triton_kn.py"
LAYOUT_TESTS = "tests/kernels/test_skinny_layout.py"

GATEWAY, GATEWAY_TESTS = "deploy/ray/nybble_ray/gateway.py", "tests/deploy/test_ray_gateway.py"

AHEAD_TESTS = "tests/engine/test_engine_ahead.py"

FAULTS = (
    Fault(
        "a step ahead goes on from a token that was drawn again",
        "service/engine/engine.py",
        "            if redrawn:\n",
        "            if False:\n",
        f"{AHEAD_TESTS} -k drawn_again",
    ),
    Fault(
        "a step ahead draws the number of the token before",
        "service/engine/sampler.py",
        "sequences[r].uniform(int(r < ahead))",
        "sequences[r].uniform()",
        f"{AHEAD_TESTS} -k 'no_answer_tells and steady'",
    ),
    Fault(
        "the step ahead of one that failed is kept",
        "service/engine/engine.py",
        "                self._reset(self._launched)\n                self._launched = None\n",
        "                self._reset(self._launched)\n",
        f"{AHEAD_TESTS} -k memory_that_runs_out",
    ),
    Fault(
        "what is drawn again is drawn from the next step's logits",
        "service/engine/sampler.py",
        "copy=any(p.top_p < 1 for p in params)",
        "copy=False",
        "tests/engine/test_sampler.py -k needs_no_logits",
    ),
    Fault(
        "the engine takes longer to end than whatever stops a container waits",
        "service/server.py",
        "ENGINE_EXIT_S = 10.0",
        "ENGINE_EXIT_S = 20.0",
        "tests/deploy/test_stopping.py",
    ),
    Fault(
        "a stream that has begun is begun again",
        GATEWAY,
        "if begun:\n",
        "if False:\n",
        f"{GATEWAY_TESTS} -k has_begun",
    ),
    Fault(
        "some replica answers for the one that was named",
        GATEWAY,
        "part.replica != call.only",
        "False",
        f"{GATEWAY_TESTS} -k does_not_answer",
    ),
    Fault(
        "a metric has another name than its alerts ask for",
        "service/metrics.py",
        'Metric("requests_waiting",',
        'Metric("requests_queued",',
        "tests/deploy/test_prometheus.py -k asks_for_what_is_exported",
    ),
    Fault(
        "a label has another name than the dashboard asks for",
        "service/metrics.py",
        '"GEMM calls, by path and phase.", ("path", "phase"), _gemm_calls',
        '"GEMM calls, by path and phase.", ("path", "kind"), _gemm_calls',
        "tests/deploy/test_dashboard.py -k asks_for_what_is_exported",
    ),
    Fault(
        "the choices of one request keep all slots",
        "service/engine/scheduler.py",
        "return held[newcomer.group] + 2 <= held[running.group]",
        "return False",
        "tests/engine/test_scheduler.py -k 'youngest_choice or nobody_holds'",
    ),
    Fault(
        "what made way makes way again before it has got on",
        "service/engine/scheduler.py",
        "return sequence.output_len - (sequence.gave_way_len or 0) >= _PROGRESS * len(sequence.tokens)",
        "return True",
        "tests/engine/test_scheduler.py -k got_on",
    ),
    Fault(
        "an error is written into an answer under way",
        "service/http_protocol.py",
        "if self._busy():",
        "if False:",
        "tests/service/test_http_protocol.py -k untouched",
    ),
    Fault(
        "of pipelined requests only the last hears that the client has gone",
        "service/http_protocol.py",
        "self._answering.disconnected = True",
        "pass",
        "tests/service/test_http_protocol.py -k its_client_has_gone",
    ),
    Fault(
        "the beginning of a cached prefix goes before its end",
        "service/engine/kv_blocks.py",
        "for block in reversed(blocks):",
        "for block in blocks:",
        "tests/engine/test_prefix_cache.py -k least_recently",
    ),
    Fault(
        "cached prefixes are shared across salts",
        "service/engine/sequence.py",
        "_root(self.request.cache_salt)",
        "_root(None)",
        "tests/engine/test_prefix_cache.py -k salts",
    ),
    Fault(
        "a key of a block's own tokens alone",
        "service/engine/sequence.py",
        "hashlib.sha256(before + block.tobytes())",
        "hashlib.sha256(block.tobytes())",
        "tests/engine/test_prefix_cache.py -k 'answers_are_the_same or tell_apart'",
    ),
    Fault(
        "a prompt is taken whole from the prefix cache",
        "service/engine/scheduler.py",
        "full = (len(sequence.tokens) - 1) // self.block_size\n        return self.pool.find",
        "full = len(sequence.tokens) // self.block_size\n        return self.pool.find",
        "tests/engine/test_prefix_cache.py -k last_prompt_token",
    ),
    Fault(
        "prompts that begin alike are all computed",
        "service/engine/scheduler.py",
        "self.block_size) in self._computing",
        "self.block_size) in ()",
        "tests/engine/test_prefix_cache.py -k sixteen",
    ),
    Fault(
        "nobody is told that a prompt's next block is about to be computed",
        "service/engine/scheduler.py",
        "min(stop // self.block_size + 1, full)",
        "min(stop // self.block_size, full)",
        "tests/engine/test_prefix_cache.py -k waits_until",
    ),
    Fault(
        "what is under way for a prompt is taken for computed",
        "service/engine/engine.py",
        "self._scheduler.commit(sequence, ahead.get(sequence, sequence.computed))",
        "self._scheduler.commit(sequence, sequence.computed)",
        "tests/engine/test_engine_ahead.py -k is_known_only_when",
    ),
    Fault(
        "a step that went on from one that failed counts as computed",
        "service/engine/engine.py",
        "self._reset(self._launched)",
        "pass",
        "tests/engine/test_engine_ahead.py -k begins_again",
    ),
    Fault(
        "a step of two passes is followed",
        "service/engine/engine.py",
        " or len(last.flight) > 1:",
        ":",
        "tests/engine/test_engine_ahead.py -k two_passes",
    ),
    Fault(
        "a row that is left is passed over",
        "service/engine/scheduler.py",
        "any(s.pending == 1 for s in self.running) or ",
        "",
        "tests/engine/test_scheduler.py -k one_row_left",
    ),
    Fault(
        "who waits for a prefix misses the step after it is there",
        "service/engine/scheduler.py",
        "if (step.prefill and self._prefix_awaited) or ",
        "if ",
        "tests/engine/test_scheduler.py -k waits_for_a_prefix",
    ),
    Fault(
        "a prompt raises the limit for itself",
        "service/engine/scheduler.py",
        "len(candidates) - 1,",
        "len(candidates),",
        "tests/engine/test_pacing.py -k for_itself",
    ),
    Fault(
        "rows beside streams whatever they take",
        "service/engine/pacing.py",
        "return seconds <= self._seconds or",
        "return True or",
        "tests/engine/test_pacing.py -k 16k",
    ),
    Fault(
        "minus infinity is a number",
        "service/engine/sampler.py",
        "math.isfinite(array[r, i]) and math.isfinite(least[r])",
        "math.isfinite(array[r, i])",
        "tests/engine/test_sampler.py -k not_finite",
    ),
    Fault(
        "int8 scale of the row beside it",
        "kernels/linear/triton_int8.py",
        "scale = tl.load(s_ptr + safe_n)",
        "scale = tl.load(s_ptr + (safe_n ^ 1))",
        "tests/kernels/test_int8.py -k 'reference and 100'",
    ),
    Fault(
        "neighbouring group's scale",
        SKINNY,
        "group = tl.minimum(step + 1, last - 1) * BK // G",
        "group = (tl.minimum(step + 1, last - 1) * BK // G) ^ 1",
        f"{SKINNY_TESTS} -k every_format",
    ),
    Fault(
        "zero point dropped",
        SKINNY,
        "zero = (zero_word >> z_shift) & 0xF",
        "zero = ((zero_word >> z_shift) & 0xF) * 0 + 8",
        f"{SKINNY_TESTS} -k 'every_format and asym'",
    ),
    Fault(
        "zero point of the row beside it",
        SKINNY,
        "z_shift = ((safe_n % 8) * 4)",
        "z_shift = (((safe_n ^ 1) % 8) * 4)",
        f"{SKINNY_TESTS} -k 'every_format and asym'",
    ),
    Fault(
        "step wider than a group is let through",
        SKINNY,
        "if tile.block_k > group_size or group_size % tile.block_k:",
        "if False:",
        f"{SKINNY_TESTS} -k wider_than_a_group",
    ),
    Fault(
        "tile's step not clamped to the group",
        "kernels/tiles/__init__.py",
        "block_k = min(tile.block_k, g)",
        "block_k = tile.block_k",
        "tests/kernels/test_tiles.py -k clamped",
    ),
    Fault(
        "nibble order reversed in the kernel",
        SKINNY,
        "nibbles = (words >> (4 * P)) & 0x000F000F",
        "nibbles = (words >> (12 - 4 * P)) & 0x000F000F",
        f"{SKINNY_TESTS} -k every_format",
    ),
    Fault(
        "lanes of a pair exchanged",
        SKINNY,
        "return tl.reshape(tl.join(low, high), (BN, BK))",
        "return tl.reshape(tl.join(high, low), (BN, BK))",
        f"{SKINNY_TESTS} -k every_format",
    ),
    Fault(
        "shuffle left out of the packing",
        LAYOUT,
        "        _swap_bits(chunk, 8, 0x0000FF00)\n    scales",
        "    scales",
        f"{LAYOUT_TESTS} -k shift",
    ),
    Fault(
        "bias dropped",
        SKINNY,
        "out += tl.load(bias_ptr + safe_n).to(tl.float32)[None, :]",
        "out += 0.0",
        f"{SKINNY_TESTS} -k every_format",
    ),
    Fault(
        "bias added by every part of K",
        SKINNY,
        "HAS_BIAS=bias is not None and tile.split_k == 1",
        "HAS_BIAS=bias is not None",
        f"{SKINNY_TESTS} -k split_k",
    ),
    Fault(
        "padding read: row stride taken from K",
        SKINNY,
        "        words.stride(0),\n        scales.stride(0),",
        "        words.shape[1],\n        scales.stride(0),",
        f"{SKINNY_TESTS} -k padding",
    ),
    Fault(
        "rows of x past M read",
        SKINNY,
        "safe_m = tl.minimum(rows_m, M - 1).to(tl.int64)",
        "safe_m = (rows_m - rows_m % BM).to(tl.int64)",
        f"{SKINNY_TESTS} -k ragged",
    ),
    Fault(
        "every stride padded",
        LAYOUT,
        "if cliff and stride % cliff == 0 else stride",
        "if cliff else stride",
        f"{LAYOUT_TESTS} -k cliff",
    ),
    Fault(
        "zero points of the activation type let through",
        "kernels/linear/operands.py",
        "if zeros.dtype != torch.int32 or tuple(zeros.shape)",
        "if tuple(zeros.shape)",
        f"{SKINNY_TESTS} -k named",
    ),
    Fault(
        "undersized view let through",
        "kernels/linear/operands.py",
        "if end * t.element_size() > t.untyped_storage().nbytes():",
        "if False:",
        f"{SKINNY_TESTS} -k undersized",
    ),
    Fault(
        "[K, N/8]: neighbouring group's scale",
        KN,
        "group = k0 // GROUP",
        "group = (k0 // GROUP) ^ 1",
        f"{KN_TESTS} -k every_format",
    ),
    Fault(
        "[K, N/8]: square zero points of unknown format not transposed",
        KN,
        'orientation = "ng" if shape == accepted["ng"] else "gn"',
        'orientation = "gn" if shape == accepted["gn"] else "ng"',
        f"{KN_TESTS} -k oriented",
    ),
    Fault(
        "CPU int4: zero point dropped",
        "kernels/linear/cpu.py",
        "shift = (SYMMETRIC_ZERO - weight.zeros.to(torch.float32)) * weight.scales.to(torch.float32)",
        "shift = torch.zeros(weight.scales.shape)",
        "tests/kernels/test_linear.py -k every_cpu_path",
    ),
    Fault(
        "compiled code taken from the cache unchecked",
        "kernels/native/cache.py",
        "if hashlib.sha256(code).digest() != sha:",
        "if False:",
        "tests/kernels/native/test_cache.py -k damaged",
    ),
    Fault(
        "one specialisation's code taken for another's",
        "kernels/native/build.py",
        "str(len(program.defines)), *program.defines, arch]",
        "str(len(program.defines)), arch]",
        "tests/kernels/native/test_build.py -k key",
    ),
    Fault(
        "HIP's argument list ended as CUDA's",
        "kernels/native/driver.py",
        "extra_end = 3",
        "extra_end = 0",
        "tests/kernels/native/test_driver.py -k carries",
    ),
    Fault(
        "shared memory taken back by a smaller launch",
        "kernels/native/driver.py",
        "if shared_bytes > self._allowed_bytes:",
        "if shared_bytes > _NO_OPT_IN_BYTES:",
        "tests/kernels/native/test_driver.py -k 48_kib",
    ),
    Fault(
        "self-check that accepts anything",
        "kernels/selfcheck.py",
        "if not error <= tolerance:",
        "if False:",
        "tests/kernels/test_linear.py tests/kernels/test_hybrid.py -k selfcheck",
    ),
    Fault(
        "path that failed its self-check is served",
        "kernels/linear/backends.py",
        "if fits and all((kernel.name, path) in broken for path in kernel.paths):",
        "if False:",
        "tests/engine/test_engine.py -k selfcheck",
    ),
    Fault(
        "skinny routed beyond its rows",
        "kernels/linear/route.py",
        "m <= limits.skinny_max_m:",
        "m <= 2 * limits.skinny_max_m:",
        "tests/kernels/test_linear.py -k routes",
    ),
    Fault(
        "streams and prompts of a pass in each other's places",
        "service/engine/inputs.py",
        "groups = [(spans[:streams], room), (prompts, together)]",
        "groups = [(spans, room + together)]",
        "tests/engine/test_inputs.py -k place_of_their_own",
    ),
    Fault(
        "a pass of more rows than there is room for",
        "service/engine/inputs.py",
        "return rows <= self.rungs[-1]",
        "return True",
        "tests/engine/test_inputs.py -k none_beside_it",
    ),
    Fault(
        "newcomers not counted in what a step may take",
        "service/engine/pacing.py",
        "growth = then / usual if then > usual > 0 else 1.0",
        "growth = 1.0",
        "tests/engine/test_pacing.py -k many_that_come",
    ),
    Fault(
        "who never reads keeps its connection",
        "service/http_protocol.py",
        "elif self.flow.write_paused or self._answering is None or self._answering.response_complete:",
        "elif False:",
        "tests/service/test_http_protocol.py -k nobody_reads",
    ),
    Fault(
        "a prompt raises the limit for itself",
        "service/engine/scheduler.py",
        "sum(lengths) - max(lengths)",
        "sum(lengths)",
        "tests/engine/test_pacing.py -k 16k",
    ),
    Fault(
        "what streams read not counted in their usual step",
        "service/engine/pacing.py",
        " + self.per_position * positions",
        "",
        "tests/engine/test_pacing.py -k full_house",
    ),
    Fault(
        "parts added up for prompts that have one, stored already",
        "kernels/attention/triton_paged.py",
        "    if tiles <= per_split:\n        return\n",
        "",
        "tests/kernels/test_paged_attention.py -k one_part",
    ),
    Fault(
        "RDNA given more rows than its matrix tile has",
        "kernels/linear/skinny.py",
        'return MAX_M if target.kind == "cuda" else _TILE_M',
        "return MAX_M",
        "tests/kernels/test_skinny.py -k refused_in_words",
    ),
    Fault(
        "shared memory of many rows without a second team's sums",
        "kernels/linear/skinny.py",
        "return self.teams * self.m * (self.rows + 4) * 4 + 4",
        "return self.m * (self.rows + 4) * 4 + 4",
        "tests/kernels/test_skinny.py -k sums_of_teams",
    ),
    Fault(
        "decode kernel given rows that 16-byte loads cannot start at",
        "kernels/linear/skinny.py",
        "if words.data_ptr() % _ALIGNMENT_BYTES or (words.shape[0] > 1 and stride % _ALIGNMENT_BYTES):",
        "if False:",
        "tests/kernels/test_skinny.py -k bad_calls",
    ),
    Fault(
        "decode kernel's plan for short groups taken whether it fits or not",
        "kernels/linear/skinny.py",
        "if plan.shared_bytes(k, group_size, scale_bytes, zeros) <= target.lds_bytes:\n            return plan",
        "if True:\n            return plan",
        "tests/kernels/test_skinny.py -k fits_the_chip",
    ),
    Fault(
        "decode kernel's ring larger than its shared memory",
        "kernels/linear/skinny.py",
        "while plan.shared_bytes(k, group_size, scale_bytes, zeros) > target.lds_bytes and plan.waves > 1:",
        "while False:",
        "tests/kernels/test_skinny.py -k fits_the_chip",
    ),
    Fault(
        "dense copies taken without room",
        "service/memory.py",
        'return "enabled" if needs.dense_bytes <= dense_budget else "refused"',
        'return "enabled"',
        "tests/service/test_memory.py -k dense",
    ),
    Fault(
        "attention window one too wide",
        "kernels/attention/sdpa.py",
        "visible &= key > position - window",
        "visible &= key >= position - window",
        "tests/kernels/test_attention.py",
    ),
    Fault(
        "GPTQModel's v1 zero points not shifted by one",
        "service/checkpoints/gptq.py",
        "words = words + ONE_PER_FIELD[bits]",
        "words = words + 0",
        "tests/checkpoints/test_readers.py",
    ),
    Fault(
        "GPTQ v1 zero points not shifted by one",
        "service/checkpoints/gptq.py",
        "zeros = (zeros + 1) & ((1 << bits) - 1)",
        "zeros = zeros & ((1 << bits) - 1)",
        "tests/checkpoints/test_formats.py -k gptq",
    ),
    Fault(
        "prompt scored again after a preemption",
        "service/engine/sequence.py",
        "return range(max(self.computed, len(self.scored)), min(stop, self.prompt_len - 1))",
        "return range(self.computed, min(stop, self.prompt_len - 1))",
        "tests/engine/test_engine.py -k scored",
    ),
    Fault(
        "score of a prompt token taken from the row of the next one",
        "service/engine/runner.py",
        "followers = sequence.tokens[part.start + 1 : part.stop + 1]",
        "followers = sequence.tokens[part.start : part.stop]",
        "tests/engine/test_engine.py -k scored",
    ),
    Fault(
        "pipe to the engine left non-blocking",
        "service/client.py",
        "os.set_blocking(self._connection.fileno(), True)",
        "pass",
        "tests/service/test_client.py -k in_pieces",
    ),
    Fault(
        "any key opens",
        "service/api/auth.py",
        'return any(matches) and kind.lower() == "bearer"',
        'return bool(key) and kind.lower() == "bearer"',
        "tests/api/test_security.py -k 401",
    ),
    Fault(
        "best_of gives the worst",
        "service/api/generation.py",
        "key=lambda one: -one.logprob_per_token",
        "key=lambda one: one.logprob_per_token",
        "tests/api/test_completions.py -k best_of",
    ),
    Fault(
        "time limit that aborts nothing",
        "service/client.py",
        "        self.close()\n        self.fail(error)",
        "        self.fail(error)",
        "tests/api/test_limits.py -k limit",
    ),
    Fault(
        "zero points believed, not looked at",
        "service/checkpoints/gptq.py",
        "            self._version = other\n",
        "            pass\n",
        "tests/checkpoints/test_formats.py -k 'as_they_are_stored'",
    ),
    Fault(
        "a block of memory is handed out while a tensor lies in it",
        "kernels/host_memory.py",
        "if sys.getrefcount(self._blocks[i]) == self._unused",
        "if True",
        "tests/kernels/test_host_memory.py",
    ),
    Fault(
        "two GGUF tensors may lie in one place",
        "service/checkpoints/gguf.py",
        "if int(t.data_offset) < end:",
        "if False:",
        "tests/checkpoints/test_gguf.py -k 'one_place or claims'",
    ),
    Fault(
        "quantize writes what serve refuses",
        "service/checkpoints/quantize.py",
        "        _refuse_unservable(source, src)\n",
        "",
        "tests/checkpoints/test_quantize.py -k 'serve_would_refuse or fit_the_weights'",
    ),
    Fault(
        "gaps between tensors let through",
        "service/checkpoints/safetensors_file.py",
        "            if entry.start != at:",
        "            if False:",
        "tests/checkpoints/test_safetensors_file.py",
    ),
    Fault(
        "prepacked form of other weights used",
        "service/checkpoints/prepacked.py",
        'file.metadata.get("fingerprint") == fingerprint()',
        "True",
        "tests/checkpoints/test_prepacked.py",
    ),
    Fault(
        "Gemma's norms without their one",
        "service/models/load.py",
        "return stored.float() + offset if offset",
        "return stored.float() if offset",
        "tests/models/test_decoder.py -k gemma",
    ),
    Fault(
        "partly rotated heads left in their order",
        "service/models/load.py",
        "    order = head_order(c.rope)\n    if order is None:",
        "    order = head_order(c.rope)\n    if True:",
        "tests/models/test_decoder.py -k partial",
    ),
    Fault(
        "GGUF: Q4_0's high nibbles first",
        "service/checkpoints/gguf.py",
        "torch.cat((nibbles & 0xF, nibbles >> 4), dim=-1)",
        "torch.cat((nibbles >> 4, nibbles & 0xF), dim=-1)",
        "tests/checkpoints/test_gguf_models.py -k q4_0",
    ),
    Fault(
        "paged attention: window one too wide",
        "kernels/attention/triton_paged.py",
        "visible &= key[None, :] > position[:, None] - window",
        "visible &= key[None, :] >= position[:, None] - window",
        "tests/kernels/test_paged_attention.py -k window",
    ),
    Fault(
        "paged attention: parts of split keys added up unweighed",
        "kernels/attention/triton_paged.py",
        "out = tl.sum(parts * weight[:, None], axis=0)",
        "out = tl.sum(parts, axis=0)",
        "tests/kernels/test_paged_attention.py -k splits",
    ),
    Fault(
        "fused rotation turns the wrong way",
        "kernels/fused/kv_write.py",
        "high * cos + low * sin, high)",
        "high * cos - low * sin, high)",
        "tests/kernels/test_fused.py -k 'rotat'",
    ),
    Fault(
        "one part of a split GEMM forgotten",
        "kernels/fused/parts.py",
        "tl.where(s < splits, inside, False)",
        "tl.where(s < splits - 1, inside, False)",
        "tests/kernels/test_fused.py -k 'parts-3'",
    ),
    Fault(
        "the last of equal logits is chosen",
        "kernels/fused/argmax.py",
        "first = tl.min(tl.where(key == tl.max(key, axis=0), column, V), axis=0)",
        "first = tl.max(tl.where(key == tl.max(key, axis=0), column, 0), axis=0)",
        "tests/kernels/test_logits.py -k first_of_equals",
    ),
    Fault(
        "a NaN is smaller than every logit",
        "kernels/fused/argmax.py",
        "tl.where(magnitude >= INF, INF,",
        "tl.where(magnitude == INF, INF,",
        "tests/kernels/test_logits.py -k not_finite",
    ),
    Fault(
        "equals beyond the count are among the largest",
        "kernels/fused/rescore.py",
        "return above | (equal & (place < COUNT)), place",
        "return above | equal, tl.minimum(place, COUNT - 1)",
        "tests/kernels/test_logits.py -k share_the_largest",
    ),
    Fault(
        "padding rows cached at slot 0",
        "kernels/attention/paged.py",
        "self.slots[count:rows] = -1",
        "self.slots[count:rows] = 0",
        "tests/engine/test_inputs.py",
    ),
    Fault(
        "a graph that replays something else is trusted",
        "service/engine/graphs.py",
        "if relative <= _TOLERANCE:  # false for NaN",
        "if True:",
        "tests/engine/test_graphs.py",
    ),
    Fault(
        "graphs checked on the inputs that they were captured with",
        "service/engine/graphs.py",
        "    fill(1)\n",
        "",
        "tests/engine/test_graphs.py -k stale",
    ),
    Fault(
        "split GEMMs of a decode step add up in a launch of their own",
        "service/models/ops.py",
        "return layer.parts(h) if isinstance(layer, W4A16Linear) else Parts.of(layer(h))",
        "return Parts.of(layer(h))",
        "tests/models/test_launches.py",
    ),
    Fault(
        "an APU's VRAM and GTT are added up",
        "service/doctor/facts.py",
        "return max(self.memory.vram_total_bytes, self.memory.gtt_total_bytes)",
        "return self.memory.vram_total_bytes + self.memory.gtt_total_bytes",
        "tests/service/test_doctor.py -k no_sum",
    ),
    Fault(
        "pages of the mapping limit taken for MiB",
        "service/doctor/known.py",
        "PAGES_PER_GIB = GIB // 4096",
        "PAGES_PER_GIB = GIB // (1 << 20)",
        "tests/service/test_doctor.py -k 262144",
    ),
    Fault(
        "a graph is replayed for prompts that it was not captured for",
        "service/engine/inputs.py",
        "return self._fixed[kind].get(len(batch.token_ids)) is batch",
        "return len(batch.token_ids) in self._fixed[kind]",
        "tests/engine/test_inputs.py -k batch_of_their_own",
    ),
    Fault(
        "decode kernel's programs compiled ahead for large layers only",
        "kernels/linear/skinny.py",
        "_ROWS_PER_UNIT = tuple(range(16, 320, 8))",
        "_ROWS_PER_UNIT = tuple(range(64, 320, 8))",
        "tests/kernels/test_skinny.py -k compiled_ahead",
    ),
    Fault(
        "two blocks of the decode kernel counted without what CUDA keeps for each",
        "kernels/linear/skinny.py",
        "_RESERVED_BYTES = 1024",
        "_RESERVED_BYTES = 0",
        "tests/kernels/test_skinny.py -k room_for_two",
    ),
    Fault(
        "a dependent launch reads before it waits",
        "kernels/fused/norm.py",
        "    wait_for_last(DEPENDENT)\n    h = tl.load(residual_ptr + row + column, mask=inside, other=0.0)\n",
        "    h = tl.load(residual_ptr + row + column, mask=inside, other=0.0)\n    wait_for_last(DEPENDENT)\n",
        "tests/rdna/test_layer_kernels.py -k 'dependent_launch_waits and parts'",
    ),
    Fault(
        "rows of logits of an earlier pass are read behind those asked for",
        "kernels/attention/paged.py",
        "self._logit_rows[len(logit_rows) :] = 0",
        "self._logit_rows[len(logit_rows) : sequences] = 0",
        "tests/engine/test_inputs.py -k nobody_asked_for",
    ),
    Fault(
        "a step that nobody waits for is kept until somebody comes",
        "service/engine/engine.py",
        "            # Nobody waits for it; read after a pause, it would count as a step that took as long.\n"
        "            self._launched = None\n",
        "            pass\n",
        "tests/engine/test_engine_ahead.py -k pause",
    ),
    Fault(
        "a prompt is timed behind what an earlier one left in the cache",
        "service/bench_engine.py",
        'f"prefill {next(_PREFILLS)}"',
        'f"prefill {i}"',
        "tests/service/test_bench_engine.py -k left_in_the_cache",
    ),
    Fault(
        "a batch to be timed begins one by one",
        "service/bench_engine.py",
        """    for i in range(batch):
        engine.add(random_request(engine, "prompt", first, 1, seed=i))
        while engine.has_work:
            engine.step()
""",
        "",
        "tests/service/test_bench_engine.py -k side_by_side",
    ),
    Fault(
        "the kernel's version counts more than the fix that it shows",
        "service/doctor/facts.py",
        "if rule.shown_by_cwsr:",
        "if False:",
        "tests/service/test_doctor.py -k at_whatever_version",
    ),
)


def copy_package(folder: Path) -> None:
    """The package as `import nybble` finds it, and deploy/ as NYBBLE_DEPLOY does, copied."""
    for part in ("kernels", "service", "csrc", "deploy"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / part, folder / "nybble" / part, ignore=ignore)


# A fault may make a test run for ever: it is caught then too.
LIMIT_S = 120
CAUGHT = ("red", "red (hung)")

# Most of what running a few tests takes is importing these: it is done once, and each run goes on from there.
PRELOADED = (
    "anyio.pytest_plugin",
    "fastapi.testclient",
    "gguf",
    "httpx",
    "prometheus_client.core",
    "pydantic_settings",
    "torch._dynamo",
    "transformers.modeling_utils",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "triton.language",
    "triton.testing",
    "uvicorn",
)


def preload() -> None:
    # As in tests/conftest.py; but a process that has asked for a GPU and is forked has none, so that another one asks.
    asked = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
    if subprocess.run([sys.executable, "-c", asked]).returncode:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    for module in PRELOADED:
        with contextlib.suppress(ImportError):  # the tests that need it say so
            importlib.import_module(module)


def run_tests(arguments: str, folder: Path) -> NoReturn:
    """pytest on the package in `folder`, in a process of its own. It keeps there what failed, for --last-failed."""
    import pytest

    assert "nybble" not in sys.modules
    gc.freeze()  # a collection would look at all that is imported again
    os.setsid()
    with output_of(folder).open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(ROOT)
    os.environ |= {"PYTHONPATH": str(folder), "NYBBLE_DEPLOY": str(folder / "nybble" / "deploy")}
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.path[0] = str(folder)
    places = f"--basetemp={folder / 'tmp'} -o cache_dir={folder / 'cache'}"
    sys.exit(pytest.main(shlex.split(f"-q -x -p anyio {places} {arguments}")))


def output_of(folder: Path) -> Path:
    return folder / "output.txt"


def exit_status(arguments: str, folder: Path) -> int | None:
    """Of pytest; None when it had to be stopped."""
    run = get_context("fork").Process(target=run_tests, args=(arguments, folder))
    run.start()
    run.join(LIMIT_S)
    status = run.exitcode
    with contextlib.suppress(ProcessLookupError):  # what its tests have started, too
        os.killpg(run.pid, signal.SIGKILL)
    run.join()
    return status


def verdict(fault: Fault) -> str:
    """ "red" when the fault fails its tests, else what went wrong."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_package(folder)
        target = folder / "nybble" / fault.file
        source = target.read_text()
        if source.count(fault.old) != 1:
            return f"the code is there {source.count(fault.old)} times, not once"
        target.write_text(source.replace(fault.old, fault.new))
        status = exit_status(fault.tests, folder)
        if status not in (1, None):
            return "GREEN" if status == 0 else f"pytest exit {status}: {output_of(folder).read_text()[-200:]}"
        # Not whatever is run like this: what failed passes without the fault. The file has its old time again, so that
        # nothing compiled from the other is taken for it.
        shutil.copy2(ROOT / fault.file, target)
        control = exit_status(f"--last-failed {fault.tests}", folder)
        if control != 0:
            return f"red without it, too: pytest exit {control}: {output_of(folder).read_text()[-200:]}"
        return CAUGHT[status is None]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    names = parser.parse_args().names
    faults = [f for f in FAULTS if not names or f.name in names]
    survived = 0
    preload()
    # Two at once: some wait more than they compute. They share what is compiled of the tests.
    with tempfile.TemporaryDirectory() as compiled, ProcessPoolExecutor(2, get_context("fork")) as workers:
        sys.pycache_prefix, sys.dont_write_bytecode = compiled, False
        running = {workers.submit(verdict, fault): fault for fault in faults}
        for done in as_completed(running):
            fault, result = running[done], done.result()
            survived += result not in CAUGHT
            print(f"{fault.name:62} {fault.file:34} {result}", flush=True)
    print(f"{len(faults)} faults, {survived} not caught")
    return 1 if survived or not faults else 0


if __name__ == "__main__":
    sys.exit(main())
