"""Model directories as transformers writes them, and as they are not meant to be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
from safetensors.torch import load_file, save_file

from reference_server.model import Llama, ModelError, default_model_path, load, tiny, tiny_tokenizer
from reference_server.model.tiny import TEMPLATE
from reference_server.text import TokenizerError

PROMPT = [7, 250, 3, 99, 32, 32, 180, 41, 0, 12]


def write(model: Llama, directory: Path, **saving: Any) -> Path:
    """A directory that transformers itself writes, beside the tokenizer."""
    peers.as_transformers(model).save_pretrained(directory, **saving)
    tiny_tokenizer()._backend.save(str(directory / "tokenizer.json"))
    return directory


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(directory: Path, **changes: Any) -> None:
    """Replace, add, or (with None) take away tensors; `__` stands for a dot."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, value in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if value is not None:
            tensors[name.replace("__", ".")] = value
    save_file(tensors, path, metadata={"format": "pt"})


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "output_bias": True, "mlp_bias": True},
    "llama tied": {"tie_embeddings": True},
    "mistral": {"architecture": "MistralForCausalLM"},
    "qwen2": {"architecture": "Qwen2ForCausalLM", "attention_bias": True, "tie_embeddings": True},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "qk_norm": True, "head_dim": 24},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_transformers_saved_computes_the_same(variant: str, tmp_path: Path) -> None:
    """In one file and in shards; and transformers, loading what it wrote, agrees."""
    import transformers

    model = tiny(seed=4, dtype=torch.float32, **VARIANTS[variant])
    single, sharded = write(model, tmp_path / "one"), write(model, tmp_path / "many", max_shard_size="100KB")
    assert (single / "model.safetensors").is_file()
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    peer = transformers.AutoModelForCausalLM.from_pretrained(single, dtype=torch.float32)
    wanted = peers.peer_logits(peer, PROMPT)
    for directory in (single, sharded):
        loaded = load(directory, dtype=torch.float32)
        assert loaded.model.config == model.config
        assert float((peers.scheduled_logits(loaded.model, [PROMPT], chunk_tokens=3)[0] - wanted).abs().max()) < 1e-4


def test_weights_are_converted_to_the_type_that_is_asked_for(tmp_path: Path) -> None:
    directory = write(tiny(seed=4, dtype=torch.bfloat16), tmp_path)
    loaded = load(directory, dtype=torch.float64)
    assert loaded.model.dtype == loaded.model.embedding.dtype == torch.float64
    assert torch.equal(loaded.model.embedding, tiny(seed=4, dtype=torch.bfloat16).embedding.double())


def test_name_end_tokens_and_template_of_a_directory(tmp_path: Path) -> None:
    directory = write(tiny(), tmp_path / "some model")
    assert load(directory, dtype=torch.float32).eos == frozenset()
    edit(directory / "config.json", eos_token_id=256)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 257]}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    loaded = load(str(directory), dtype=torch.float32)
    assert (loaded.name, loaded.eos) == ("some model", frozenset({256, 257}))
    messages = [{"role": "user", "content": "hi"}]
    assert loaded.tokenizer.chat(messages) == tiny_tokenizer().chat(messages)


def test_every_tensor_that_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    directory = write(tiny(), tmp_path)
    change_tensors(directory, model__norm__weight=None, model__layers__0__mlp__up_proj__weight=torch.zeros(3, 64),
                   model__layers__2__mlp__up_proj__weight=torch.zeros(96, 64))
    with pytest.raises(ModelError) as caught:
        load(directory, dtype=torch.float32)
    for part in ("model.norm.weight is missing", "model.layers.2.mlp.up_proj.weight is not a weight of this model",
                 "model.layers.0.mlp.up_proj.weight has shape [3, 64], not [96, 64]"):
        assert part in str(caught.value)


def test_biases_that_the_config_does_not_promise_are_refused(tmp_path: Path) -> None:
    directory = write(tiny(attention_bias=True, output_bias=True), tmp_path)
    edit(directory / "config.json", attention_bias=False)
    with pytest.raises(ModelError, match=r"model\.layers\.0\.self_attn\.q_proj\.bias is not a weight of this model"):
        load(directory, dtype=torch.float32)


def test_a_tied_matrix_may_be_written_out_if_it_is_the_same(tmp_path: Path) -> None:
    model = tiny(tie_embeddings=True, dtype=torch.float32)
    directory = write(model, tmp_path)
    change_tensors(directory, lm_head__weight=model.embedding.clone(), model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    assert torch.equal(load(directory, dtype=torch.float32).model.head, model.head)
    change_tensors(directory, lm_head__weight=model.embedding + 1)
    with pytest.raises(ModelError, match=r"lm_head\.weight differs from the embedding, and tie_word_embeddings"):
        load(directory, dtype=torch.float32)


def test_integers_are_no_weights(tmp_path: Path) -> None:
    directory = write(tiny(), tmp_path)
    change_tensors(directory, model__norm__weight=torch.ones(64, dtype=torch.int8))
    with pytest.raises(ModelError, match=r"model\.norm\.weight of .* is torch\.int8; allowed: torch\.float64"):
        load(directory, dtype=torch.float32)


def test_files_that_are_not_as_they_should_be(tmp_path: Path) -> None:
    directory = write(tiny(), tmp_path)
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    whole = single.read_bytes()
    single.write_bytes(whole[:1000])
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        load(directory, dtype=torch.float32)
    single.rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        load(directory, dtype=torch.float32)
    for content, message in (
        ("{", "must hold an object weight_map"), ("[]", "must hold an object weight_map"), ('{"weight_map": []}', "must hold an object weight_map"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "must name files of its own directory"),
        ('{"weight_map": {"a": 1}}', "must name files of its own directory"),
        ('{"weight_map": {"a": "x.safetensors"}}', r"names files that are not there: x\.safetensors"),
    ):
        index.write_text(content)
        with pytest.raises(ModelError, match=message):
            load(directory, dtype=torch.float32)
    for name in ("one", "two"):
        (directory / f"{name}.safetensors").write_bytes(whole)
    index.write_text('{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}')
    with pytest.raises(ModelError, match="stands in two files"):
        load(directory, dtype=torch.float32)


def test_a_directory_that_lacks_something(tmp_path: Path) -> None:
    directory = write(tiny(), tmp_path)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        load(directory, dtype=torch.float32)
    (directory / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match=r"config\.json must hold an object, not list"):
        load(directory, dtype=torch.float32)
    (directory / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        load(directory, dtype=torch.float32)
    with pytest.raises(ModelError, match="nowhere does not exist"):
        load(tmp_path / "nowhere", dtype=torch.float32)
    with pytest.raises(ModelError, match=r"a directory with config\.json and safetensors, or a \.gguf file; .* is neither"):
        load(default_model_path().with_name("__init__.py"), dtype=torch.float32)


def test_ids_out_of_range(tmp_path: Path) -> None:
    directory = write(tiny(), tmp_path / "a")
    edit(directory / "config.json", eos_token_id=258)
    with pytest.raises(ModelError, match=r"eos_token_id of config\.json must be integers from 0 to 257"):
        load(directory, dtype=torch.float32)
    directory = write(tiny(vocab_size=257), tmp_path / "b")
    with pytest.raises(ModelError, match="the tokenizer has ids up to 257, and the model 257 tokens"):
        load(directory, dtype=torch.float32)
