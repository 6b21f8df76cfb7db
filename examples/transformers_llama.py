"""Proves LlamaForCausalLM of transformers on a mesh as it is, and then trains it there.

torchrun --nproc-per-node 4 examples/transformers_llama.py --tp 2 --pp 2
"""

import argparse

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import compose
from compose.parallel.mesh import batch_share

parser = argparse.ArgumentParser()
for axis in ("tp", "pp", "dp_replicate"):
    parser.add_argument(f"--{axis}", type=int, default=1)
dist.init_process_group("gloo")
torch.manual_seed(0)  # the same model and data on every rank
config = LlamaConfig(vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=4)
config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 16
model = LlamaForCausalLM(config)
tokens = torch.randint(99, (8, 33))
batch = {"input_ids": tokens[:, :-1], "targets": tokens[:, 1:]}

parallel = compose.Parallel(dp_shard=-1, **vars(parser.parse_args()))
mesh, options, plan = compose.init_mesh(parallel), compose.Options(parallel), compose.plan_of(model)
report = compose.verify(model, plan, mesh, batch, options)
composition = compose.apply(model, plan, mesh, options)
optimizer = torch.optim.AdamW([p for _, p in composition.named_parameters()], lr=3e-3)
index, count = batch_share(mesh)
mine = {name: value.chunk(count)[index] for name, value in batch.items()}
losses: list[float] = []
for _ in range(20):
    losses.append(compose.forward_backward(composition, mine, micro_batch=1).item())
    compose.clip_grad_norm_(composition, 1.0)
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(compose.plan_code(plan), str(report).splitlines()[-1], sep="\n\n")
    print(f"loss {losses[0]:.3f}, then {losses[-1]:.3f}")
dist.destroy_process_group()
