"""Meshes of data and tensor parallel ranks, for tests of what must hold on each."""

MESHES: list[dict[str, int | bool]] = [
    *({"dp_shard": n, "zero": zero} for n in (2, 4) for zero in range(4)),
    *({"dp_replicate": 2, "dp_shard": 2, "zero": zero} for zero in range(4)),
    *(
        {"tp": tp, "sequence": sequence, "loss": loss}
        for tp in (2, 4)
        for sequence in (True, False)
        for loss in (True, False)
    ),
    *({"dp_shard": 2, "tp": 2, "zero": zero} for zero in range(4)),
    {"dp_shard": 2, "tp": 2, "sequence": False, "loss": False},
    *({"dp_replicate": 2, "dp_shard": 2, "tp": 2, "zero": zero} for zero in range(4)),
]


def name_of(mesh: dict[str, int | bool]) -> str:
    """A mesh in a few words."""
    return " ".join(f"{key} {value}" for key, value in mesh.items())
