"""Weights are told apart by what they hold, not by what they are called."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

import engine_adapter.identity as identity
from engine_adapter.identity import LoraDigests, weights_digest
from kvstore.errors import ConfigurationError


def write(folder: Path, seed: int, *, tensors: int = 3, size: int = 50_000, name: str = "model.safetensors") -> None:
    """A file in the format of safetensors."""
    folder.mkdir(exist_ok=True)
    header = {
        f"layer.{number}": {"dtype": "U8", "shape": [size], "data_offsets": [number * size, (number + 1) * size]}
        for number in range(tensors)
    }
    text = json.dumps(header).encode()
    data = np.random.default_rng(seed).integers(0, 256, tensors * size, dtype=np.uint8).tobytes()
    (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "config.json").write_text('{"hidden_size": 8}')


@pytest.fixture(params=["whole", "sampled"])
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "sampled":
        monkeypatch.setattr(identity, "WHOLE_BYTES", 0)
    return str(request.param)


def test_a06_equal_weights_have_one_digest_wherever_they_lie(tmp_path: Path, reading: str) -> None:
    write(tmp_path / "a", 1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert weights_digest(tmp_path / "a") == weights_digest(tmp_path / "b")


def test_a06_other_weights_of_the_same_shapes_and_names_have_another(tmp_path: Path, reading: str) -> None:
    write(tmp_path / "a", 1)
    write(tmp_path / "b", 2)
    assert weights_digest(tmp_path / "a") != weights_digest(tmp_path / "b")


def test_a06_one_changed_tensor_is_seen(tmp_path: Path, reading: str) -> None:
    write(tmp_path / "a", 1)
    before = weights_digest(tmp_path / "a")
    file = tmp_path / "a" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-50_000:] = bytes(255 - byte for byte in data[-50_000:])
    file.write_bytes(data)
    assert weights_digest(tmp_path / "a") != before


def test_another_configuration_or_type_is_another_model(tmp_path: Path) -> None:
    write(tmp_path / "a", 1)
    before = weights_digest(tmp_path / "a", ["torch.bfloat16"])
    assert weights_digest(tmp_path / "a", ["torch.float32"]) != before
    (tmp_path / "a" / "config.json").write_text('{"hidden_size": 8, "rope_theta": 1}')
    assert weights_digest(tmp_path / "a", ["torch.bfloat16"]) != before


def test_a_folder_without_weights_asks_for_a_revision(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="revision"):
        weights_digest(tmp_path)


def test_a_broken_file_asks_for_a_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "WHOLE_BYTES", 0)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60))
    with pytest.raises(ConfigurationError, match="revision"):
        weights_digest(tmp_path)


def known(digests: LoraDigests, number: int, folder: Path, *, reloaded: bool = False) -> bytes:
    """The digest, once it is there."""
    while (digest := digests.ask(number, str(folder), reloaded=reloaded)) is None:
        digests._known[number, str(folder)][1].result(10)
    return digest


@pytest.mark.parametrize("how", ["under a new number", "in place"])
def test_a03_an_adapter_that_was_loaded_anew_is_another_one(tmp_path: Path, how: str) -> None:
    lora, digests = tmp_path / "lora", LoraDigests()
    write(lora, 1, name="adapter_model.safetensors")
    first = known(digests, 1, lora)
    assert first == known(digests, 1, lora) and len(first) == 16
    write(lora, 2, size=50_001, name="adapter_model.safetensors")
    if how == "in place":
        assert known(digests, 1, lora, reloaded=True) != first
        assert known(digests, 1, lora) != first, "and from then on"
    else:
        assert known(digests, 2, lora) != first
    digests.close()


def test_a03_an_adapter_whose_files_change_under_the_engine_has_no_name(tmp_path: Path) -> None:
    """The engine goes on with what it loaded, or loads it anew when it needs the room: nobody knows which."""
    lora, digests = tmp_path / "lora", LoraDigests()
    write(lora, 1, name="adapter_model.safetensors")
    known(digests, 1, lora)
    write(lora, 2, size=50_001, name="adapter_model.safetensors")
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"changed since .* new name"):
            digests.ask(1, str(lora))
    digests.close()
