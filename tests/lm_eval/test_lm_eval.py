"""lm-evaluation-harness's local-completions against a running server, without a network: tokenizer, scores, generation.

lm-eval brings a hundred packages, so it lives in an environment of its own, whose Python NYBBLE_LM_EVAL names
(`make test-lm-eval` makes one).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from http_fixtures import run_server

from nybble.kernels.attention import Span
from nybble.service.engine.load import build_engine
from nybble.service.engine.protocol import EngineConfig
from nybble.service.models import Batch
from nybble.service.text import TextCodec

pytestmark = pytest.mark.lm_eval

CHECKPOINT = Path(__file__).parents[1] / "data" / "llama-ct-g32"
FLAGS = (
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--lm-head",
    "keep",
    "--threads",
    "1",
    "--max-model-len",
    "512",
)

DOCS = [
    {"question": "The sky is", "choices": [" blue", " made of cheese", " a"], "answer": 0},
    {"question": "Two and two are", "choices": [" four", " five or so"], "answer": 1},
    {"question": "你好, she said and", "choices": [" left 🙂", " stayed", " é"], "answer": 2},
    {"question": "A" * 30, "choices": [" B", " C"], "answer": 1},
]
CHOICES = """
task: tiny_choices
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
metadata: {version: 1}
"""
ROLLING = """
task: tiny_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}{{choices[0]}}"
metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]
metadata: {version: 1}
"""
GENERATE = """
task: tiny_generate
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["e"], max_gen_toks: 12, temperature: 0, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
metadata: {version: 1}
"""
TASKS = {"tiny_choices": CHOICES, "tiny_rolling": ROLLING, "tiny_generate": GENERATE}


def run_lm_eval(url: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Samples by task, in the order of DOCS."""
    python = os.environ.get("NYBBLE_LM_EVAL")
    assert python, "NYBBLE_LM_EVAL is not set: it names a Python with lm-eval, see make test-lm-eval"
    docs = folder / "docs.jsonl"
    docs.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(task % docs)
    arguments = f"model={CHECKPOINT.name},base_url={url}/v1/completions,num_concurrent=4,max_length=512"
    command = [python, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", arguments]
    command += ["--tasks", *TASKS, "--include_path", str(folder), "--batch_size", "3"]
    command += ["--output_path", str(folder / "out"), "--log_samples"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH",)}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    samples = {}
    for name in TASKS:
        (file,) = (folder / "out").rglob(f"samples_{name}_*.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        samples[name] = sorted(lines, key=lambda line: line["doc_id"])
    return samples


class Reference:
    """The model itself, without engine, batching or HTTP."""

    def __init__(self) -> None:
        config = {
            "dtype": "float32",
            "device": "cpu",
            "lm_head": "keep",
            "threads": 1,
            "kv_cache_bytes": 8 << 20,
        }
        self.engine = build_engine(EngineConfig(str(CHECKPOINT), **config))
        self.codec = TextCodec.load(CHECKPOINT)

    def logprobs(self, ids: tuple[int, ...]) -> torch.Tensor:
        """[T, V], row t after ids[:t + 1]."""
        rows = torch.arange(len(ids))
        blocks = list(range(-(-len(ids) // self.engine.info.block_size)))
        batch = Batch(torch.tensor(ids), rows, [Span(len(ids), len(ids), blocks)])
        with torch.inference_mode():
            return self.engine._runner.model.forward(batch).float().log_softmax(-1)

    def encode(self, text: str) -> tuple[int, ...]:
        return self.codec.encode(text, add_special_tokens=False)

    def score(self, context: tuple[int, ...], continuation: tuple[int, ...]) -> tuple[float, bool]:
        """Log-probability of the continuation, and whether it is the greedy one."""
        logprobs = self.logprobs(context + continuation)[len(context) - 1 : -1]
        own = logprobs.gather(1, torch.tensor(continuation).unsqueeze(1)).squeeze(1)
        return float(own.sum()), bool((own == logprobs.amax(1)).all())


def test_scores_are_the_models_own(tmp_path: Path) -> None:
    with run_server(CHECKPOINT, tmp_path / "log", *FLAGS, real=True) as server:
        server.wait_listening()
        server.wait_ready()
        samples = run_lm_eval(server.url, tmp_path)
        assert "Traceback" not in server.log.read_text()
    reference = Reference()
    for doc, sample in zip(DOCS, samples["tiny_choices"], strict=True):
        context = reference.encode(doc["question"])
        wanted = []
        for choice in doc["choices"]:
            whole = reference.encode(doc["question"] + choice)
            wanted.append(reference.score(context, whole[len(context) :]))
        found = [(float(score), greedy) for ((score, greedy),) in sample["resps"]]
        assert [greedy for _, greedy in found] == [str(greedy) for _, greedy in wanted]
        assert [score for score, _ in found] == pytest.approx([score for score, _ in wanted], abs=2e-3)
        assert sample["acc"] == float(max(range(len(wanted)), key=lambda i: wanted[i][0]) == doc["answer"])

    prefix = reference.encode(str(reference.codec.describe()["eos_token"]))
    bos = reference.codec.describe()["bos_token"]
    prefix = reference.encode(bos) if bos else prefix
    for doc, sample in zip(DOCS, samples["tiny_rolling"], strict=True):
        ids = reference.encode(doc["question"] + doc["choices"][0])
        ((found,),) = sample["resps"]
        assert float(found) == pytest.approx(reference.score(prefix, ids)[0], abs=2e-3)

    for doc, sample in zip(DOCS, samples["tiny_generate"], strict=True):
        ids = reference.encode(doc["question"])
        for _ in range(12):
            ids += (int(reference.logprobs(ids)[-1].argmax()),)
        text = reference.codec.decode(ids)[len(doc["question"]) :]
        assert sample["resps"] == [[text.partition("e")[0]]]
