"""A norm over the rows of several members, each row scaled and shifted by its own member's gain and bias."""

import torch
from torch.nn import functional

from .norm_formulas import NormFormula


def member_norm(
    formula: NormFormula, rows: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Normalise the rows of M members, each with the gain and bias of its member.

    On a CPU every member is one call of the fused kernel, written into its slice of the result. Measured there (384
    features, 1,024 tokens a member, fp32, forward and backward) it takes 1.5 to 1.9 times a plain norm on the same
    rows. Against that, `torch.cat` of the members' norms takes 1.5 to 2.0, and normalising once and scaling apart 2.4
    to 4. Elsewhere, and in compiled graphs, all rows are normalised at once and then scaled: the fewest kernels, and
    what a compiler can fuse. That choice has not been measured on an accelerator; `scripts/benchmark_norm.py --device
    cuda` does so.

    Args:
        formula: What the norm computes.
        rows: (M, B, ..., D), or (M, B, D, ...) where the norm's features come first.
        gain: (M, D), in the rows' dtype.
        bias: (M, D), in the rows' dtype; None for a norm without one.

    Returns:
        (M * B, ..., D), or (M * B, D, ...).

    Raises:
        RuntimeError: The shapes do not fit each other.
    """
    feature = 2 if formula.channels_first else -1
    if rows.shape[0] != gain.shape[0] or rows.shape[feature] != gain.shape[1]:
        raise RuntimeError(f"Rows {tuple(rows.shape)} do not fit gains {tuple(gain.shape)}.")
    is_cpu = _runs_eagerly_on_cpu(rows)
    if is_cpu:  # gradients of 16-bit gains would be rounded a row at a time, to several per cent after a thousand rows
        gain, bias = _at_least_fp32(gain), None if bias is None else _at_least_fp32(bias)
    if len(gain) == 1 and not (is_cpu and (rows.dtype != gain.dtype or not formula.subtracts_mean)):
        # A plain norm, which writes its result itself.
        return formula(rows.flatten(0, 1), gain[0], None if bias is None else bias[0])
    rows = rows.movedim(feature, -1)
    norm = FusedMemberNorm.apply if is_cpu else scale_after_norm
    output = norm(formula, rows, gain, bias)
    return output.movedim(-1, 1) if formula.channels_first else output


def _runs_eagerly_on_cpu(rows: torch.Tensor) -> bool:
    # Compilers, tracers and torch.func see through plain operations only.
    return (
        rows.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
    )


def scale_after_norm(
    formula: NormFormula, rows: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Normalise all rows at once, then scale and shift them, in plain operations.

    Args:
        formula: What the norm computes; where its features lie does not count here.
        rows: (M, B, ..., D).
        gain: (M, D).
        bias: (M, D), or None.

    Returns:
        (M * B, ..., D).
    """
    size = gain.shape[1:]
    if formula.subtracts_mean:
        normalised = functional.layer_norm(rows, size, eps=formula.eps)
    else:
        normalised = functional.rms_norm(rows, size, eps=formula.eps)
    over_rows = (len(gain), *(1 for _ in rows.shape[1:-1]), *size)
    if bias is None:
        scaled = normalised * gain.view(over_rows)
    else:
        scaled = torch.addcmul(bias.reshape(over_rows), normalised, gain.view(over_rows))
    return scaled.flatten(0, 1)


class FusedMemberNorm(torch.autograd.Function):
    """The norm with one fused kernel a member, forward and backward, for CPUs.

    Slices of one preallocated result take the place of `torch.cat`: of all rows there is one new tensor in each
    direction. Temporary tensors are one member's and stay in the cache.

    `apply` takes what `scale_after_norm` takes, gain and bias in fp32 at least, and returns the same. Second
    derivatives are those of that function.
    """

    @staticmethod
    def forward(ctx, formula, rows, gain, bias):
        """Normalise, scale and shift."""
        output = rows.new_empty(rows.shape[0] * rows.shape[1], *rows.shape[2:])
        slices = output.view(rows.shape).unbind()
        biases = [None] * len(gain) if bias is None else bias.unbind()
        forward = _layer_norm_into if formula.subtracts_mean else _rms_norm_into
        statistics = [
            forward(*member, formula.eps) for member in zip(slices, rows.unbind(), gain.unbind(), biases, strict=True)
        ]
        ctx.save_for_backward(rows, gain, bias, *(tensor for pair in statistics for tensor in pair))
        ctx.formula = formula
        return output

    @staticmethod
    def backward(ctx, grad_output):
        """Return the gradients of the rows, gain and bias, of those that need one."""
        rows, gain, bias, *statistics = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # create_graph=True: the kernels below would leave no graph
            return None, *_differentiable_gradients(ctx.formula, (rows, gain, bias), needed, grad_output)
        gradients = [
            tensor.new_empty(tensor.shape) if need else None
            for tensor, need in zip((rows, gain, bias), needed, strict=True)
        ]
        backward = _layer_norm_backward if ctx.formula.subtracts_mean else _rms_norm_backward
        grad_slices = grad_output.view(rows.shape).unbind()
        biases = [None] * len(gain) if bias is None else bias.unbind()
        for m, member in enumerate(zip(grad_slices, rows.unbind(), gain.unbind(), biases, strict=True)):
            results = backward(*member, statistics[2 * m], statistics[2 * m + 1], needed)
            for gradient, result in zip(gradients, results, strict=True):
                if gradient is not None:
                    gradient[m].copy_(result)
        return None, *gradients


def _layer_norm_into(output, x, gain, bias, eps):
    """Write one member's layer norm into `output`, (B, ..., D); return its mean and 1 / deviation, (B, ..., 1)."""
    result, mean, inverse_deviation = torch.ops.aten.native_layer_norm(x, gain.shape, gain, bias, eps)
    output.copy_(result)
    return mean, inverse_deviation


def _layer_norm_backward(grad_output, x, gain, bias, mean, inverse_deviation, needed):
    """Return one member's gradients of x, gain and bias, all in the precision of the gain."""
    grad_output, x = grad_output.to(gain.dtype), x.to(gain.dtype)
    return torch.ops.aten.native_layer_norm_backward(
        grad_output, x, gain.shape, mean, inverse_deviation, gain, bias, needed
    )


def _rms_norm_into(output, x, gain, bias, eps):
    """Write one member's RMS norm into `output`, (B, ..., D); return a mean of zero and 1 / RMS, (B, ..., 1)."""
    mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=gain.dtype).square_().div_(x.shape[-1])
    inverse_rms = mean_square.add_(torch.finfo(gain.dtype).eps if eps is None else eps).rsqrt_()
    normalised = x * inverse_rms
    if bias is None:
        torch.mul(normalised, gain, out=output)
    else:
        torch.addcmul(bias, normalised, gain, out=output)
    return torch.zeros_like(inverse_rms), inverse_rms


def _rms_norm_backward(grad_output, x, gain, bias, mean, inverse_rms, needed):
    """Return one member's gradients of x, gain and bias.

    PyTorch has no fused RMS norm for CPUs. With a mean of zero the kernel of the layer norm gives its gradients, but
    for what the mean would add to x's: minus the mean of gain * grad_output over the features, divided by the RMS.
    """
    grad_output = grad_output.to(gain.dtype)
    gradients = _layer_norm_backward(grad_output, x, gain, bias, mean, inverse_rms, needed)
    if needed[0]:
        gradients[0].addcmul_(torch.mv(grad_output.flatten(0, -2), gain).view_as(inverse_rms), inverse_rms / len(gain))
    return gradients


def _at_least_fp32(tensor):
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _differentiable_gradients(formula, inputs, needed, grad_output):
    """Return the gradients of the rows, gain and bias as part of a graph of their own."""
    # A view of each: the gradient must not go on into a graph in which one input depends on another.
    inputs = [None if tensor is None else tensor.view_as(tensor) for tensor in inputs]
    output = scale_after_norm(formula, *inputs).to(grad_output.dtype)
    wanted = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
    gradients = iter(torch.autograd.grad(output, wanted, grad_output, create_graph=True))
    return [next(gradients) if need else None for need in needed]
