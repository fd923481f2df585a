"""vLLM's OpenAI server with kvsched as its scheduler, in processes of its own, answering the real client."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is installed by make test-hosts")

import openai
from rig import EOS, VOCABULARY, make_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from vllm import LLM, SamplingParams, TokensPrompt

DEADLINE_S = 240.0
"""A start takes 20 seconds on an idle machine."""
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def word(token: int) -> str:
    """No word begins with another one, so that the special ones are found in none."""
    return f"w{token:03}"


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer of 512 words: token 7 is the word w007."""
    directory = make_model(tmp_path_factory.mktemp("spoken"))
    tokenizer = Tokenizer(WordLevel({word(token): token for token in range(VOCABULARY)}, unk_token=word(0)))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, unk_token=word(0), bos_token=word(1), eos_token=word(EOS), chat_template=TEMPLATE).save_pretrained(directory)
    return directory


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=10) as answer:
        text: str = answer.read().decode()
    return text


@pytest.fixture(scope="module")
def server(spoken: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a running server."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    log = tmp_path_factory.mktemp("server") / "log.txt"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(spoken), "--served-model-name", "tiny", "--host", "127.0.0.1",
               "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "16",
               "--max-num-batched-tokens", "256", "--num-gpu-blocks-override", "100", "--block-size", "32", "--enable-prompt-tokens-details",
               "--scheduler-cls", "kvsched.hosts.vllm.KvschedScheduler", "--additional-config", '{"kvsched": {"head": "backfill"}}']
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    try:
        begin = time.monotonic()
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() - begin < DEADLINE_S, log.read_text()[-4000:]
            try:
                get(f"{address}/health")
                break
            except OSError:
                time.sleep(0.5)
        assert "kvsched schedules:" in log.read_text()
        yield address
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


@pytest.fixture
def client(server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=120)


def words(tokens: list[int]) -> str:
    return " ".join(map(word, tokens))


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(7)
    shared = [draw.randrange(3, VOCABULARY) for _ in range(200)]
    return [[*shared[: draw.randint(0, 200)], *(draw.randrange(3, VOCABULARY) for _ in range(draw.randint(1, 300)))] for _ in range(count)]


def test_completions_are_those_of_vllms_own_scheduler(client: openai.OpenAI, spoken: Path) -> None:
    """24 clients at once, as token ids and as text, against an engine with vLLM's scheduler."""
    asked = prompts(24)
    params = SamplingParams(temperature=0.0, max_tokens=24, detokenize=False)
    llm = LLM(model=str(spoken), skip_tokenizer_init=True, enforce_eager=True, dtype="float32", num_gpu_blocks_override=100, block_size=32, max_model_len=1024)
    expected = [list(output.outputs[0].token_ids) for output in llm.generate([TokensPrompt(prompt_token_ids=tokens) for tokens in asked], params, use_tqdm=False)]
    llm.llm_engine.engine_core.shutdown()

    def ask(at: int) -> Any:
        text: Any = asked[at] if at % 2 else words(asked[at])
        return client.completions.create(model="tiny", prompt=text, max_tokens=24, temperature=0, extra_body={"return_token_ids": True})

    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(ask, range(24)))
    assert [answer.choices[0].token_ids for answer in answers] == expected
    assert [answer.usage.prompt_tokens for answer in answers] == [len(tokens) for tokens in asked]
    ends = {answer.choices[0].finish_reason for answer in answers}
    assert ends <= {"length", "stop"}
    assert all(tokens[-1] == EOS or len(tokens) == 24 for tokens in expected)


def test_streams_samples_stop_strings_and_the_prefix_cache(client: openai.OpenAI) -> None:
    tokens = prompts(1)[0] * 2
    whole = client.completions.create(model="tiny", prompt=tokens, max_tokens=20, temperature=0, extra_body={"ignore_eos": True})
    text = whole.choices[0].text
    pieces = list(client.completions.create(model="tiny", prompt=tokens, max_tokens=20, temperature=0, stream=True, extra_body={"ignore_eos": True}))
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == text
    assert len(pieces) > 10
    stop = text.split()[7]
    stopped = client.completions.create(model="tiny", prompt=tokens, max_tokens=20, temperature=0, stop=[stop], extra_body={"ignore_eos": True})
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == text[: text.index(stop)]
    two = client.completions.create(model="tiny", prompt=tokens, max_tokens=5, temperature=0.8, n=2, extra_body={"ignore_eos": True})
    assert [len(choice.text.split()) for choice in two.choices] == [5, 5]
    again = client.completions.create(model="tiny", prompt=tokens, max_tokens=1, temperature=0)
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == (len(tokens) - 1) // 32 * 32


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": words(list(range(10, 60)))}], max_tokens=6, temperature=0)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 50
    assert len((answer.choices[0].message.content or "").split()) <= 6


def test_a_request_for_what_is_not_done_fails_and_the_server_goes_on(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError):
        client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=5, extra_body={"structured_outputs": {"choice": ["w005", "w006"]}})
    assert client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=5, temperature=0, extra_body={"ignore_eos": True}).choices[0].finish_reason == "length"


def test_a_client_that_goes_away_leaves_nothing_behind(client: openai.OpenAI, server: str) -> None:
    stream = client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=900, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    begin = time.monotonic()
    while True:
        metrics = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in get(f"{server}/metrics").splitlines() if line.startswith("vllm:")}
        if metrics["vllm:num_requests_running"] == metrics["vllm:num_requests_waiting"] == metrics["vllm:kv_cache_usage_perc"] == 0:
            break
        assert time.monotonic() - begin < DEADLINE_S, metrics
        time.sleep(0.2)
    assert metrics["vllm:prefix_cache_queries_total"] > metrics["vllm:prefix_cache_hits_total"] > 0
