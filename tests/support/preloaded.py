"""A process imports these before tests fork others: see tests/support/pool.py."""
# ruff: noqa: F401

import gc

import numpy
import pytest
import safetensors.torch
import tokenizers
import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.utils.tensorboard
import torchao.float8
import transformers

import models.deepseek_v3
import models.llama
import models.qwen3
import tests.support.command_lines

torch.set_num_threads(1)
gc.freeze()  # no fork then looks at these objects, or copies the memory that they are in
