"""Prints docs/composition.md."""

from compose.config.rules import RULES


def markdown() -> str:
    """Return the table of rules as the text of ``docs/composition.md``."""
    rows = [
        f"| {rule.condition} | {rule.reason} | {rule.upstream and 'PyTorch: ' + rule.upstream} |"
        for rule in RULES
    ]
    return "\n".join([_HEAD, *rows, _TAIL])


_HEAD = """\
# What composes

Any product of `dp_replicate`, `dp_shard`, `cp`, `tp` and `pp` composes, with any `ep` over it, every
ZeRO stage, schedule and `cp_method`, tied and untied embeddings, and documents packed into a sequence,
unless a rule below says no. The checks of a config read the same table, `compose/config/rules.py`.
The tests prove that every mesh of 8 ranks is either refused by it or equal to one process.
`python -m compose.config.rules_page` prints this page. Which meshes a config allows:

```bash
python -m compose legal train.toml --world-size 8
```

| what must hold | why | forced by |
| --- | --- | --- |"""
_TAIL = """
Where the last column is empty, arithmetic asks for it. A refusal names the key, the reason and the
nearest change that helps."""


if __name__ == "__main__":
    print(markdown())
