"""Pooled outputs on their way from the device to the host. Chapter 10."""

import torch
from torch import Tensor


class HostCopy:
    """The outputs of one step, by request id; made by the ModelRunner, read by the Engine.

    They are packed into one tensor, which no later step overwrites, and copied on a stream of their
    own into pinned memory while the next step runs. On a CPU (`stream` None) nothing is under way.
    """

    def __init__(self, outputs: dict[str, Tensor], stream: "torch.cuda.Stream | None"):
        self.forms = {name: (output.shape, output.dtype) for name, output in outputs.items()}
        self.packed = torch.cat([output.flatten() for output in outputs.values()])
        self.event = None
        if stream is None:
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.packed.record_stream(stream)  # its memory is not reused before the copy ends
            self.packed = self.packed.to("cpu", non_blocking=True)
            self.event = stream.record_event()

    def wait(self) -> None:
        """Until the copy is here; then out of pinned memory, which the next step's copy takes."""
        if self.event is not None:
            self.event.synchronize()
            self.packed, self.event = self.packed.clone(), None

    @torch.inference_mode(False)
    def split(self) -> dict[str, Tensor]:
        """The outputs, each a tensor of its own that may be written into and trained on."""
        self.wait()
        parts = self.packed.split([shape.numel() for shape, _ in self.forms.values()])
        named = zip(self.forms.items(), parts, strict=True)
        return {
            name: part.view(shape).to(dtype, copy=True) for (name, (shape, dtype)), part in named
        }
