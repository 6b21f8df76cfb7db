"""Pairs of a token set, their loss against a plain one and on every mesh, and what is refused."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer

from compose.__main__ import main
from compose.data.datasets import open_data, task_of
from compose.preference import pairs as module
from compose.preference.pairs import PairLoss, Pairs, Preference
from tests.preference.cases import BASE, LORA, MESHES, batch_of, dpo, keys_of
from tests.support.data_made import token_set
from tests.support.helpers import Keys, make_config, prove_case, proved, refusal, refusals, tiered
from tests.support.pool import Pool
from tests.support.tokenizers_made import save_tokenizer

NAN = float("nan")


def opened(folder: Path, seq_len: int = 32) -> Pairs:
    """The pairs of a set: of 8 and 10 inputs, and of 4 and 14."""
    path = str(token_set(folder, "pairs"))
    samples = Preference().open(path, make_config(1, dpo__beta=0.1, train__seq_len=seq_len))
    assert isinstance(samples, Pairs)
    return samples


def test_a_sample_holds_both_replies(tmp_path: Path) -> None:
    samples = opened(tmp_path, 25)
    assert len(samples) == 2
    sample = samples.read(0)
    assert sample["tokens"].tolist()[:18] == [*range(8), *range(9, 19)]
    assert sample["document_ids"].tolist() == [0] * 8 + [1] * 10 + [2] * 7
    assert sample["positions"].tolist() == [*range(8), *range(10), *[-1] * 7]
    ids, side, reference = sample["targets"].unbind(-1)
    assert ids[:18].tolist() == [*range(1, 9), *range(10, 20)]
    assert side[:18].tolist() == [1] * 8 + [-1] * 10
    assert not reference[:18].any()
    assert sample["targets"][18:].isnan().all()


@pytest.mark.parametrize(
    ("seq_len", "kept"), [(32, [8, 10, 4, 14]), (17, [8, 9, 4, 13]), (9, [4, 4, 4, 5])]
)
def test_long_pairs_are_cut(tmp_path: Path, seq_len: int, kept: list[int]) -> None:
    """Each is cut to a half, or to what the other leaves."""
    samples = opened(tmp_path, seq_len)
    assert samples.lengths.tolist() == kept
    assert samples.bins == [[0, 1], [2, 3]]


def test_a_pair_without_a_target_is_left_out(tmp_path: Path) -> None:
    token_set(tmp_path, "pairs")
    (tmp_path / "trained-00000.bin").write_bytes(bytes([0] * 8 + [1] * 12))
    path = str(tmp_path)
    samples = Preference().open(path, make_config(1, dpo__beta=0.1, train__seq_len=9))
    assert len(samples) == 1
    assert samples.read(0)["tokens"][0] == 20


def test_a_table_counts_both_of_a_pair_that_is_left_out(tmp_path: Path) -> None:
    """Of the second pair the rejected one has no target left, and the chosen one is not cut."""
    token_set(tmp_path, "pairs", learnt=23)
    (tmp_path / "trained-00001.bin").write_bytes(bytes([1] * 5 + [0] * 14 + [1]))
    samples = Preference().open(str(tmp_path), make_config(1, dpo__beta=0.1, train__seq_len=9))
    assert isinstance(samples, Pairs)
    learnt = int(samples.read(0)["targets"][:, 0].isfinite().sum())
    assert samples.table().splitlines()[3:6] == [
        f"  cut{4:>25}  at train.seq_len 9: 28 tokens are lost",
        f"  left out{2:>20}  of these: nothing to learn remains",
        f"  tokens learnt{learnt:>15}  in an epoch, of 8",
    ]


ROWS = [
    {"prompt": [{"role": "user", "content": "2 + 2?"}], "chosen": "4", "rejected": "naïve"},
    {
        name: [{"role": "user", "content": "add"}, {"role": "assistant", "content": reply}]
        for name, reply in (("chosen", "words, and ½"), ("rejected", "no"))
    },
]


def test_tokenized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The two replies of a pair follow each other, and alone are learnt, with the end of the turn."""
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    file, out = tmp_path / "pairs.jsonl", tmp_path / "out"
    words = [
        "tokenize",
        "--pairs",
        f"--tokenizer={tokenizer}",
        f"--out={out}",
        "--workers=1",
        str(file),
    ]
    asked = {"role": "user", "content": "multiply"}
    other = ROWS[1] | {"rejected": [asked, {"role": "assistant", "content": "no"}]}
    file.write_text("\n".join(map(json.dumps, [*ROWS, {"prompt": "a", "chosen": "b"}, other])))
    assert refusal(main, words).startswith(f"{file}:3: ")
    assert main([*words, "--skip-bad", f"--out={out}-2"]) == 0
    table = capsys.readouterr().out
    assert "4 conversations of 2 pairs" in table
    assert f"{file}:4: is no pair: the two chats ask for different things" in table
    path = f"{out}-2"
    config = make_config(1, data__path=path, dpo__beta=0.1, train__seq_len=99, model__vocab_size=300)
    (samples,) = open_data(config).sets
    decode = Tokenizer.from_file(str(tokenizer)).decode
    for row, prompt, replies in (
        (0, "2 + 2?", ("4", "naïve")),
        (1, "add", ("words, and ½", "no")),
    ):
        sample = samples.read(row)
        for document, reply in enumerate(replies):
            here = sample["document_ids"] == document
            ids, side, _ = sample["targets"][here & sample["targets"][:, 0].isfinite()].unbind(-1)
            text = decode(sample["tokens"][here].tolist(), skip_special_tokens=False)
            assert text.startswith(
                f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{reply}"
            )
            assert decode(ids.long().tolist(), skip_special_tokens=False) == f"{reply}<|im_end|>"
            assert set(side.tolist()) == {1 - 2 * document}


def test_random_pairs_have_both_sides() -> None:
    batch = batch_of(8, train__seq_len=9)
    sides = batch["targets"][..., 1]
    assert ((sides == 1).any(1) & (sides == -1).any(1)).all()
    assert batch["tokens"].dtype == torch.int64
    assert batch_of(8, train__seq_len=2)["targets"][..., 0].isnan().sum() == 0


def test_refusals(tmp_path: Path) -> None:
    chat, pairs = (str(token_set(tmp_path / kind, kind)) for kind in ("chat", "pairs"))
    lines = {
        (
            pairs,
            0.0,
        ): f"data.path: {pairs} holds pairs of replies; set dpo.beta = 0.1 to learn from them",
        (chat, 0.1): f"data.path: {chat} holds no pairs, which dpo.beta = 0.1 learns from; make some by"
        " python -m compose tokenize --pairs, or use dpo.beta = 0",
    }
    for (path, beta), line in lines.items():
        assert refusal(open_data, make_config(1, data__path=path, dpo__beta=beta)) == line
    odd = token_set(tmp_path / "odd", "pairs", shards__1__documents=1)
    (odd / "ends-00001.bin").write_bytes((20).to_bytes(8, "little"))
    path = str(odd)
    line = f"data.path: {odd / 'manifest.json'}: a shard of pairs has an odd number of documents"
    assert refusal(open_data, make_config(1, data__path=path, dpo__beta=0.1)) == line


def test_the_task_of_a_config() -> None:
    assert not isinstance(task_of(make_config(1)), Preference)
    assert isinstance(task_of(make_config(1, dpo__beta=0.1)), Preference)


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_equals_the_formula(beta: float) -> None:
    targets = batch_of(6, train__seq_len=19)["targets"].double()
    targets[2] = NAN
    logits = torch.randn(6, 19, 256, dtype=torch.float64).requires_grad_()
    loss = PairLoss(beta)
    assert loss.count(targets) == 5
    results = []
    for function in (loss, lambda logits, targets: dpo(logits, targets, beta)):
        value = function(logits, targets)
        results.append((value.detach(), *torch.autograd.grad(value, logits)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-15)


def test_is_log_2_where_the_model_is_its_reference() -> None:
    """A batch of one pair; rewards are zero, and so is the accuracy: neither reward is the greater."""
    targets = batch_of(1)["targets"]
    logits = torch.randn(1, 27, 256, requires_grad=True)
    known = module.log_probabilities(logits.detach(), targets)
    targets[..., 2] = known.where(~targets[..., 0].isnan(), NAN)
    loss = PairLoss(0.5)
    value = loss(logits, targets)
    torch.testing.assert_close(value, torch.tensor(2.0).log())
    torch.testing.assert_close(
        loss.rewards[0], torch.tensor([0.0, 0, 0, 1]).double(), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize(
    "case", tiered(MESHES, slow=set(MESHES) - {"cp"}, full={"zero 1", "ulysses x tp"})
)
def test_equals_one_process(pool: Pool, case: str) -> None:
    keys, ranks = keys_of(case)
    proved(pool.run(prove_case, ranks, keys), case)


def _broken(keys: Keys, fault: str) -> str:
    """On every rank: the report of a proof with a fault, by the rows that fail."""
    real = module.PairLoss.begin

    def swapped(self: PairLoss, composition, batch, micro_batch):  # type: ignore[no-untyped-def]
        function, batch = real(self, composition, batch, micro_batch)
        if torch.distributed.get_rank() == 1:
            batch = {**batch, "targets": batch["targets"] * torch.tensor([1.0, -1.0, 1.0])}
        return function, batch

    if fault == "swapped on one rank":
        patch = mock.patch.object(module.PairLoss, "begin", swapped)
    else:
        patch = mock.patch.object(module, "sum_over", lambda tensor, mesh, axes: tensor.detach())
    with patch:
        report = prove_case(keys, 1)
    assert not report.ok
    return "\n".join(str(report).splitlines()[:8])


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["not reduced over cp", "swapped on one rank"])
def test_faults_are_named(pool: Pool, fault: str) -> None:
    mesh = {"parallel__cp": 2} if "cp" in fault else {"parallel__dp_shard": 2}
    for lines in pool.run(_broken, 2, BASE | mesh, fault):
        assert "gradient" in lines
        assert "loss" in lines


test_the_rules_refuse = refusals(
    [
        (
            {"model__name": "dit", "train__seq_len": 256},
            "dpo.beta: 0.1 is for models of the next token, and dit learns something else; use"
            " dpo.beta = 0",
        ),
        (
            {"train__loss_chunk": 8},
            "train.loss_chunk: 8 is of a sum over tokens, and dpo.beta = 0.1 has a loss of whole pairs;"
            " use 0, or dpo.beta = 0",
        ),
        (
            {"train__z_loss": 1e-3},
            "train.z_loss: 0.001 is of a sum over tokens, and dpo.beta = 0.1 has a loss of whole pairs;"
            " use 0, or dpo.beta = 0",
        ),
        (
            LORA | {"model__lora__dropout": 0.1},
            "dpo.beta: 0.1 compares the model with a reference, and layers.0.attention.wq.lora.dropout"
            " drops out; use model.lora.dropout = 0.0",
        ),
    ],
    {"dpo__beta": 0.1},
    ["another task", "chunks", "z-loss", "dropout"],
)
