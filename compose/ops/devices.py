"""The device whose kernels compute: another than a tensor is on, if only bytes are counted."""

from torch import Tensor


def device_of(tensor: Tensor) -> str:
    """Return the type of the device whose kernels compute with ``tensor``.

    The planner runs a step on meta tensors in place of another device's, and puts that device's type
    here. So call it as ``devices.device_of``.
    """
    return tensor.device.type
