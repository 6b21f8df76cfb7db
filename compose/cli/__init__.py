"""The commands of train.py and compose: what each takes, and what its --help prints."""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Usage(NamedTuple):
    """A command: where its function of that name is, what it takes, and what --help prints."""

    module: str
    """The module of compose.cli with the function."""
    summary: str
    """Its line in the list of commands."""
    flags: Mapping[str, str]
    """The name of each flag's value, by flag; "" for a flag without one."""
    text: str
    file: bool = True
    """Whether it takes FILE.toml and --table.key=value; then --help lists the keys too."""

    def head(self, program: str) -> str:
        """Return what --help prints before the keys."""
        shown = "".join(f" [{name}{takes and ' ' + takes}]" for name, takes in self.flags.items())
        return f"{program} [FILE.toml] [--table.key=value ...]{shown}\n\n{self.text}\n{_OF_FILES}\n"


_OF_FILES = """\
FILE defaults to train.toml. If it has extends = "OTHER.toml" at its top, it takes the keys that it does
not set from OTHER.toml. On the command line a value is parsed as TOML; a bare word is a string.
--help TABLE lists the keys of one table.
"""


def _without_file(module: str, summary: str, text: str) -> Usage:
    """Return a command without FILE.toml and keys, whose text begins with its flags."""
    usage = re.split("\n\n|\ntorchrun", text)[0]
    flags = dict(re.findall(r"(--[a-z-]+)(?![\w.-])(?: ([^\s|\]]+))?", usage))
    return Usage(module, summary, flags, text, file=False)


def _flags(text: str) -> Mapping[str, str]:
    return {flag: value for flag, _, value in (each.partition(" ") for each in text.split(", "))}


TRAIN = Usage(
    "train",
    "Train: [torchrun -m] compose train FILE.toml [--table.key=value ...].",
    _flags("--dry-run, --world-size N"),
    """\
Trains the model of FILE, on one process or on the ranks that torchrun starts.

  --dry-run     print mesh, plan, parameters and bytes per rank without starting a process group
  --world-size  with --dry-run: for how many ranks
""",
)
COMMANDS = {
    "init": _without_file(
        "project",
        "Make a project: compose init DIR, with train.toml, train.py and a model to edit.",
        """\
compose init DIR

Makes DIR with train.toml, train.py, a copy of models/llama to edit in model/, a recipe for a GPU, and
train.schema.json, with which an editor completes and checks the TOML files. Existing files are not
overwritten.
""",
    ),
    "train": TRAIN,
    "verify": Usage(
        "commands",
        "Prove that the composition equals one process: torchrun -m compose verify FILE.toml.",
        {},
        """\
Runs a few steps of the composition that FILE describes, on the ranks that torchrun starts, and the same
steps of the whole model in plain PyTorch on one process. Compares all results (docs/proof.md). Exits
with 0 if they are equal, and with 1 if not.
""",
    ),
    "schedule": Usage(
        "commands",
        "Draw the pipeline's timeline: python -m compose schedule FILE.toml [--out timeline.svg|.png].",
        _flags("--out FILE.svg or .png, --world-size N"),
        """\
Prints which micro-batch each pipeline rank runs at which time, how long each rank waits, and the
activations that it keeps.

  --out         file for a picture of it
  --world-size  ranks; default: as few as the degrees of FILE need
""",
    ),
    "legal": Usage(
        "commands",
        "List the legal meshes of N ranks: python -m compose legal FILE.toml --world-size N.",
        _flags("--world-size N"),
        """\
Lists each mesh of N ranks that FILE can run on. Counts the other meshes by the rule that refuses them.

  --world-size  number of ranks
""",
    ),
    "plan": Usage(
        "plan",
        "Find the best mesh: python -m compose plan --model 13b --gpus 16xa100_40gb.",
        _flags(
            "--cluster NAME or FILE.toml, --world-size N, --model NAME, --gpus NxCLUSTER, --seq-len N, "
            "--batch N[,N], --as-is, --explain, "
            "--objective time|memory|devices|params, --tokens T, --days D, --free KEY[,KEY], "
            "--keep KEY[,KEY], --candidates N, --seconds S, --against RUN_DIR, --json FILE, "
            "--report FILE.html, --write FILE.toml"
        ),
        """\
Searches for the best mesh and options of a model, or of FILE, on a cluster. Prints an answer in words
and the best candidates, each with its memory and step time (docs/planning.md). No GPU is needed. For
example: python -m compose plan --model 13b --gpus 16xa100_40gb [--tokens 1T] [--seq-len 4096]

  --model       a size (1b, 7b, 13b, 70b ... 405b), a preset as mixtral:8x7b, or a folder with Hugging
                Face's config.json, in place of FILE; in bfloat16
  --gpus        devices of a cluster, as 16xa100_40gb, in place of --cluster and --world-size; of two
                kinds: 8xh100+8xa100
  --seq-len     tokens of a sample; default with --model: 4096
  --batch       samples of a step, or several as 256,512,1024; default with --model: as published
                models of its size had
  --cluster     a cluster of clusters/, or a file like one
  --world-size  number of ranks
  --as-is       estimate FILE as it is, without a search
  --explain     say what other compositions, half the batch and the next device cost
  --objective   what is made small: step time (default), memory, or the number of devices; or params:
                the largest standard size that fits
  --tokens      tokens to train on, as 1T
  --days        with --objective devices: days for them
  --free        keys that FILE or the command line pins and the search may change
  --keep        keys that stay as they are in FILE; those that differ from their defaults do anyway
  --candidates  how many candidates are recorded; default: 6
  --seconds     end the search after so many seconds; the answer then depends on the machine
  --against     folder of a run: compare its time and memory with the estimate
  --json        file for all candidates
  --report      page for a browser
  --write       file for FILE with the best candidate's keys; with --against, for a corrected cluster
""",
    ),
    "convert": _without_file(
        "commands",
        "Convert Hugging Face weights to a checkpoint or back:"
        " python -m compose convert SOURCE TARGET.",
        """\
python -m compose convert SOURCE TARGET [--config FILE.toml] [--original FOLDER] [--dtype TYPE]
    [--merged] [--best]

Converts in two directions. If SOURCE is a Hugging Face folder (config.json and safetensors), TARGET
becomes the folder of a run that begins with its weights. If SOURCE is a checkpoint, or the folder of a
run (its newest checkpoint is taken), TARGET becomes a Hugging Face folder, for transformers. For a run
with LoRA adapters (model.lora), TARGET has the adapters, for peft, or with --merged whole weights.

  --config    FILE.toml with the [model] of SOURCE; default: what SOURCE says
  --original  a Hugging Face folder, from which the tokenizer is copied into TARGET
  --dtype     type of the weights in a Hugging Face folder: float32 (default), bfloat16 or float16
  --merged    write whole weights, with the adapters of a run added to them
  --best      take the checkpoint of a run with the lowest validation loss (checkpoint.keep_best)
""",
    ),
    "tokenize": _without_file(
        "commands",
        "Turn text or chats into ids: python -m compose tokenize --tokenizer FILE --out DIR FILES.",
        """\
python -m compose tokenize --tokenizer tokenizer.json --out DIR [--field NAME] [--chat | --pairs]
    [--shape NAME] [--fields NAME=FIELD,...] [--roles NAME=ROLE,...]
    [--end TOKEN] [--no-special-tokens] [--skip-bad] [--workers N] FILES...

Makes the folder DIR, for data.path and data.validation. A .jsonl file has a document on each line. A
.json file may hold documents as one list. A .parquet or .arrow file, or the folder of a dataset that
`datasets` saved, has one in each row (pip install 'dtensor-compose[parquet]'). Any other file is one
document of UTF-8 text. If the command was stopped, start it again: it continues where it was.

  --tokenizer  a tokenizer.json, or a folder with one
  --out        folder to make
  --field      field or column with the text; default: text, and messages with --chat
  --chat       rows are chats, written by the tokenizer's chat template; only replies are learnt
  --pairs      rows are chats with a chosen and a rejected reply, for dpo.beta
  --shape      of rows of chats: messages, sharegpt, alpaca, prompt (with completion), chosen (the
               chosen one of preference pairs), or plain (prompt and completion without a template);
               default: as the keys of the rows say, and pairs are refused
  --fields     fields of chats with other names, such as prompt=question,completion=answer
  --roles      roles of chats with other names, such as visitor=user,agent=assistant
  --end        token that ends a document, and a reply after which the chat template writes nothing;
               default: the tokenizer's eos_token
  --no-special-tokens
               a text gets only the end token, and not the other tokens that the tokenizer adds, such as
               a token at its start
  --skip-bad   leave out rows that cannot be used, and say how many; by default the first one ends it
  --workers    processes; default: one for each core
""",
    ),
    "generate": _without_file(
        "generate",
        "Continue a text with a trained model, or make images: python -m compose generate CHECKPOINT.",
        """\
python -m compose generate CHECKPOINT --prompt TEXT [--prompts FILE] [--chat] [--max-tokens N]
    [--temperature T] [--top-p P] [--seed S] [--cache auto|on|off] [--no-special-tokens]
    [--tokenizer FILE] [--best] [--table.key=value ...]

CHECKPOINT is a checkpoint, the folder of a run (its newest whole one is taken), or a Hugging Face
folder. Under torchrun the model is sharded over all ranks (parallel.dp_shard = -1 and zero = 3), unless
keys say otherwise. A text ends at any end token of the tokenizer, of generation_config.json, of
config.json and of the chat template. Standard output has the texts alone; standard error says how many
tokens a prompt has. Keys and values are cached, so that each token runs once. Without a cache, for
example with pp or cp above 1 or experts with a capacity, every token runs the whole text again.

  --prompt            TEXT to continue; may be given several times
  --prompts           FILE with one on each line; in .jsonl: a text, or an object with prompt or \
messages
  --chat              the prompt is a user's message, in the model's chat template; the reply \
alone is shown
  --max-tokens        maximum number of tokens after the prompt; default 128
  --temperature       divides the logits; default 0.8; 0: the likeliest token
  --top-p             sample from the fewest tokens with this probability together; default 0.95
  --seed              the same seed gives the same text, on every mesh; default 0
  --cache             on, or off: every token runs the whole text again; default auto: on, where \
it can be
  --no-special-tokens the prompt is ordinary text: special tokens are neither added nor recognised
  --tokenizer         tokenizer.json or bytes; default: the run's, or Hugging Face's folder's, or bytes
  --best              take the checkpoint of a run with the lowest validation loss
""",
    ),
    "migrate": _without_file(
        "migrate",
        "Turn another trainer's config into a TOML: python -m compose migrate FILE...",
        """\
python -m compose migrate FILE... [--world-size N] [--steps N]

Reads DeepSpeed's JSON, Accelerate's YAML, transformers' TrainingArguments (JSON, YAML, or a script's
command line), torchtitan's TOML or a Megatron-LM script. Files that belong together are given together.
Prints a TOML file, in which each key has a comment on where it comes from. Standard error says of every
key whether it is mapped, changes its meaning, is not needed or is refused. If a key is refused, no TOML
is printed, and the exit code is 2.

  --world-size  number of ranks, if no file says it
  --steps       optimizer steps, if they follow from the data; needed for a warm-up that is a ratio
""",
    ),
    "measure": _without_file(
        "commands",
        "Measure this machine for the planner: [torchrun] -m compose measure --out FILE.toml.",
        """\
python -m compose measure --out FILE.toml
torchrun --nproc-per-node N -m compose measure --out FILE.toml

Times matrix products, attention and copies, and with several ranks each collective on each axis that a
mesh can have, in under 2 minutes. Nothing else should run on the machine. The first rank writes the
file, which `--cluster` takes.
""",
    ),
    "doctor": Usage(
        "doctor",
        "Find what would stop or slow a run here: [torchrun] -m compose doctor [FILE.toml].",
        _flags("--cluster NAME or FILE.toml, --json FILE"),
        """\
Checks versions, devices and their other users, shared memory, limits, threads, and the disk, locks and
mount of run.dir. Under torchrun it also times the links between all ranks, within a minute. A line says
ok, warn (this slows or harms a run) or fail (this stops a run), and the cure. Exits with 2 after fail.

  --cluster  the cluster whose bandwidths the links should reach; default: what is known of the device
  --json     file for the lines
""",
    ),
    "schema": _without_file(
        "project",
        "Print the JSON schema of a TOML file, for an editor.",
        """\
compose schema > train.schema.json

Prints every table and key with type, default and meaning. Put `#:schema ./train.schema.json` into the
first line of a TOML file, and Even Better TOML and Taplo use the schema.
""",
    ),
    "completion": _without_file(
        "project",
        "Print what a shell completes: source <(compose completion bash), or zsh, or fish.",
        """\
source <(compose completion bash)
source <(compose completion zsh)
compose completion fish | source

Commands, their flags and every key are completed.
""",
    ),
}
# The flags of all commands whose value is a path. Plain words are paths too.
PATH_FLAGS = {"--against", "--cluster", "--config", "--json", "--original", "--out", "--report"}
PATH_FLAGS |= {"--prompts", "--tokenizer", "--write"}
STORE_FLAGS = {"--original", "--tokenizer"}  # they also take what is in object storage


def help_text(model: str, tables: Iterable[str]) -> str:
    """Return every key of some tables with its type, default and description."""
    from compose.config.models import find_model, model_names  # the list of commands needs none of them
    from compose.config.tables import TABLES, Model

    lines: list[str] = []
    for table in tables:
        lines += [f"[{table}]", *_help_rows(TABLES[table])]
        if TABLES[table] is Model:
            folder = find_model(model)
            lines.append(f"  models: {', '.join(model_names())}")
            lines.append(f"  presets of {folder.name}: {', '.join(folder.presets)}")
            lines.append(f"  fields of {folder.name}'s config (a preset sets its own):")
            lines += [f"  {row}" for row in _help_rows(folder.Config)]
        lines.append("")
    return "\n".join(lines).rstrip()


def _help_rows(kind: type) -> list[str]:
    from compose.config.json_files import described
    from compose.errors import toml_value, type_name

    return [
        f"  {key:<22} {type_name(of)}, default {toml_value(default)}\n      {doc}"
        for key, of, default, doc in described(kind)
    ]
