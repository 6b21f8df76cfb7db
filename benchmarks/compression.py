"""The loss of a small model with each kind of coded messages, over that with plain ones.

    python benchmarks/compression.py [--steps 600] [--seeds 3] [--ranks 4] [--only NAME ...]
                                     [--runs FOLDER] [--keys KEY=VALUE ...]

prints one JSON line for each: the validation loss at the end over that of plain messages with the same
seed, less one; the mean of the seeds, and each. Two controls show what means nothing: "rounding" are
plain messages with AdamW's eps larger by 1e-5 of itself, and "bfloat16 weights" sends weights as mixed
precision does, which harms nobody. "int4, bare" is int4 without rotation and without feedback.
Activations are coded in runs with tp 2; "tp" is such a run with plain ones. PowerSGD and top_k begin
after a fifth of the steps.
"""

from functools import partial

from training_runs import Study, in_folder, losses, parser

WARM_UP, TP = "comm.start_step={fifth}", "parallel.tp=2"
STUDY = Study(
    "compression",
    {
        "plain": [],
        "rounding": ["optimizer.eps=1.00001e-8"],
        "bfloat16 weights": ["comm.weights=int8"],
        "bfloat16 gradients": ["comm.gradients=bfloat16"],
        "int8": ["comm.weights=int8", "comm.gradients=int8"],
        "int4": ["comm.gradients=int4"],
        "int4, no feedback": ["comm.gradients=int4", "comm.error_feedback=false"],
        "int4, bare": ["comm.gradients=int4", "comm.error_feedback=false"],
        "int4 and int4_diff": ["comm.gradients=int4", "comm.weights=int4_diff"],
        "powersgd, rank 4": ["comm.gradients=powersgd", "comm.rank=4", WARM_UP],
        "powersgd, rank 16": ["comm.gradients=powersgd", "comm.rank=16", WARM_UP],
        "top_k, 1%": ["comm.gradients=top_k", WARM_UP],
        "tp": [TP],
        "tp, int8 activations": [TP, "comm.activations=int8"],
        "tp, float8 activations": [TP, "comm.activations=float8"],
    },
    # At 1e-3 runs with the least difference end up to 1% apart.
    lr=3e-4,
    # Without the rotation, and weights in bfloat16 where int8 is asked for.
    code={
        "int4, bare": "import compose.compression.reduce as r; r.ROTATED = False",
        "bfloat16 weights": (
            "import compose.compression.reduce as r; real = r.Blocks;"
            " r.Blocks = lambda bits, *a, **k: real(16, *a, **k)"
        ),
    },
)


def main() -> None:
    given = parser(STUDY).parse_args()
    in_folder(given, partial(losses, STUDY, given=given))


if __name__ == "__main__":
    main()
