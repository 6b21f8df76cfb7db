"""The data of a run are checked together, and told from others."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from compose.__main__ import main
from compose.checkpoint.loading import data_changes
from compose.checkpoint.store import DataFields, ModelFields, State
from compose.config.tables import Train
from compose.data.datasets import described, open_data, training_batches, with_steps
from tests.support.data_made import chats, sets_of
from tests.support.helpers import refusal
from tests.support.tokenizers_made import CHATML, save_tokenizer


def test_a_file_of_other_tokens_is_told_from_the_one_before(tmp_path: Path) -> None:
    """Both files have one length. A resumed run says so."""
    tokens = np.arange(100, dtype=np.uint16)
    kinds: dict[str, Callable[[Path], object]] = {
        "a.txt": lambda path: path.write_bytes(bytes(tokens.tolist())),
        "a.bin": tokens.tofile,
        "a.npy": lambda path: np.save(path, tokens),
    }
    for name, write in kinds.items():
        tokens[60] = 60
        config = sets_of(path=str(tmp_path / name))
        seen = []
        for value in (60, 61, 60):
            tokens[60] = value
            write(tmp_path / name)
            seen.append(described(training_batches(config, open_data(config)), config))
        assert seen[0] == seen[2]
        assert {key for key in seen[0] if seen[0][key] != seen[1][key]} == {"content"}
        known = State(0, 0, 0, model=ModelFields(name="llama"), data=DataFields(**seen[0]))
        assert data_changes(Path("step"), known, seen[1]) == (
            f"step: the data are not what they were (content {seen[0]['content']}, now"
            f" {seen[1]['content']}); samples are counted on"
        )


def test_a_set_without_a_target_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    tokens = np.full(40, 7, np.uint16)
    tokens.tofile(path)
    keys: dict[str, Any] = {"path": str(path), "separator": 7}
    message = f"{path} has nothing to learn: no token of its 9 samples of train.seq_len 4 is a target"
    for key in ("path", "validation"):
        config = sets_of(**{"path": "stdlib", "separator": 7} | {key: str(path)})
        config = replace(config, train=Train(seq_len=4, validate_every=1))
        assert refusal(open_data, config) == f"data.{key}: {message}"
    tokens[20] = 8  # one sample of nine has something to learn
    tokens.tofile(path)
    assert open_data(replace(sets_of(**keys), train=Train(seq_len=4))).sets


def test_epochs_are_steps(tmp_path: Path) -> None:
    """An epoch is all samples of all sets; the last batch is filled up."""
    for name, samples in (("a.bin", 10), ("b.bin", 5)):
        np.arange(samples * 4 + 1, dtype=np.uint16).tofile(tmp_path / name)
    for paths, epochs, steps in (
        (["a.bin"], 1.0, 4),
        (["a.bin"], 0.1, 1),
        (["a.bin"], 1.2, 4),
        (["a.bin"], 1.21, 5),
        (["a.bin", "b.bin"], 1.0, 5),
        (["a.bin", "b.bin"], 2.0, 10),
    ):
        config = sets_of(path=tuple(str(tmp_path / name) for name in paths))
        config = replace(config, train=Train(seq_len=4, global_batch=3, epochs=epochs))
        data = open_data(config)
        expected = replace(config, train=replace(config.train, steps=steps, epochs=0.0))
        assert with_steps(config, data) == expected
        batches = training_batches(expected, data)
        used = min(batches.epochs(steps * 3).values())
        assert epochs <= used < epochs + 3 / 5


def test_chats_of_two_templates_are_refused(tmp_path: Path) -> None:
    """With one tokenizer.json: a run would learn both, and generate would ask by the first alone."""
    for name, template in (("a", CHATML), ("b", CHATML), ("c", f"<s>{CHATML}")):
        tokenizer = save_tokenizer(tmp_path / f"{name}-tokenizer", template)
        words = ["--chat", "--workers=1", "--tokenizer", str(tokenizer), "--out", str(tmp_path / name)]
        assert main(["tokenize", *words, str(chats(tmp_path / "chats.jsonl", 4))]) == 0

    def opened(path: str, validation: str) -> str:
        sets = sets_of(path=str(tmp_path / path), validation=str(tmp_path / validation))
        model = replace(sets.model, config=replace(sets.model.config, vocab_size=300))
        return refusal(open_data, replace(sets, model=model, train=Train(seq_len=64)))

    assert opened("a", "b") == ""
    assert opened("a", "c") == (
        f"data: {tmp_path / 'c'} was written by another chat template than {tmp_path / 'a'}; tokenize"
        " both with the same one"
    )


def test_bad_mixtures(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    a = str(tmp_path / "a.txt")
    for keys, problems in (
        ({"path": (a, "stdlib"), "weights": (1.0, 2.0)}, ""),
        ({"path": (a, a)}, f"data.path: {a} is named twice"),
        ({"path": ()}, "data.path: names nothing"),
        ({"path": ""}, "data.path: names nothing"),
        (
            {"path": (a,), "weights": (1.0, 2.0)},
            "data.weights: has 2 numbers for the 1 of data.path",
        ),
        (
            {"path": (a, "no1"), "validation": "no2"},
            "data.path: no file at no1\ndata.validation: no file at no2",
        ),
    ):
        assert refusal(open_data, sets_of(**keys)) == problems
