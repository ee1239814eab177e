"""Code snippets of prescriptions that several rules share.

Each function returns lines to paste; its docstring says what these lines do.
"""

from __future__ import annotations

import keyword


def module_expression(module: str) -> str:
    """Return a Python expression for a module, given its FQN: ``model.blocks[3].attn``."""
    expression = "model"
    for part in module.split(".") if module else []:
        if part.isdigit():
            expression += f"[{part}]"
        elif part.isidentifier() and not keyword.iskeyword(part):
            expression += f".{part}"
        else:
            return f"model.get_submodule({module!r})"
    return expression


def run_in_float32(module: str, device: str) -> str:
    """Run one module outside autocast, on FP32 copies of its inputs."""
    target = module_expression(module)
    return (
        f"import torch\n\n"
        f"def run_in_float32(module):\n"
        f'    """Call `module` outside autocast, on FP32 copies of its tensors."""\n'
        f"    forward = module.forward\n\n"
        f"    def wide(x):\n"
        f"        is_float = torch.is_tensor(x) and x.is_floating_point()\n"
        f"        return x.float() if is_float else x\n\n"
        f"    def widened(*args, **kwargs):\n"
        f"        kwargs = {{k: wide(v) for k, v in kwargs.items()}}\n"
        f"        with torch.autocast({device!r}, enabled=False):\n"
        f"            return forward(*map(wide, args), **kwargs)\n\n"
        f"    module.float().forward = widened\n\n"
        f"run_in_float32({target})\n"
    )


def code_in_float32(before: str, after: str, device: str) -> str:
    """Run functional code outside autocast, on FP32 tensors."""
    return (
        f"import torch\n\n"
        f"# the code between {before} and {after}, on FP32 tensors\n"
        f"with torch.autocast({device!r}, enabled=False):\n"
        f"    x = compute(*(t.float() for t in operands))\n"
    )


def bfloat16_autocast(device: str) -> str:
    """Autocast to BF16 instead of FP16, without a loss scaler."""
    return (
        f"import torch\n\n"
        f"with torch.autocast({device!r}, dtype=torch.bfloat16):  # was torch.float16\n"
        f"    loss = compute_loss(model, batch)\n"
        f"loss.backward()  # BF16 has FP32's exponents: no GradScaler\n"
        f"optimizer.step()\n"
    )


def lower_rate(factor: float, group: int | None = None) -> str:
    """Multiply every learning rate, or that of one parameter group, once."""
    if group is not None:
        return f"optimizer.param_groups[{group}]['lr'] *= {factor!r}  # once, before a scheduler is made\n"
    return f"for group in optimizer.param_groups:  # once, before a scheduler is made\n    group['lr'] *= {factor!r}\n"


def group_option(name: str, value: str) -> str:
    """Set an option of every parameter group to ``value``, Python code."""
    return f"for group in optimizer.param_groups:\n    group[{name!r}] = {value}\n"


def clip_norm(limit: float) -> str:
    """Clip the norm of all gradients between backward pass and optimizer step."""
    return (
        "import torch\n\n"
        "loss.backward()\n"
        f"torch.nn.utils.clip_grad_norm_(model.parameters(), {limit:.2g})\n"
        "optimizer.step()\n"
    )


def stop_behind_line() -> str:
    """Raise at the first non-finite result of a line outside all modules."""
    return (
        "import torch\n\n"
        "# behind that line, with its result for `value`:\n"
        "if not torch.isfinite(value).all():\n"
        "    raise FloatingPointError(f'{value}')\n"
    )


def halt_on_nonfinite(module: str) -> str:
    """Raise at the first non-finite output of one module, and save its inputs."""
    return (
        f"import torch\n\n"
        f"def halt(module, args, output):\n"
        f"    tensors = output if isinstance(output, (tuple, list)) else [output]\n"
        f"    if any(torch.is_tensor(t) and not torch.isfinite(t).all() for t in tensors):\n"
        f"        torch.save(args, 'nonfinite-inputs.pt')\n"
        f"        raise FloatingPointError(type(module).__name__)\n\n"
        f"{module_expression(module)}.register_forward_hook(halt)\n"
    )


def lower_rate_and_clip(norm: float = 1.0) -> str:
    """Divide the learning rate by ten, and clip gradients to ``norm`` before every step."""
    return (
        "import torch\n\n"
        "for group in optimizer.param_groups:\n    group['lr'] /= 10\n"
        "# before optimizer.step():\n"
        f"torch.nn.utils.clip_grad_norm_(model.parameters(), {float(f'{norm:.3g}')!r})\n"
    )


def detect_anomaly() -> str:
    """Turn on anomaly detection, so that autograd names the forward line whose backward pass made the NaN."""
    return (
        "import torch\n\n"
        "with torch.autograd.set_detect_anomaly(True):\n"
        "    loss = compute_loss(model, batch)\n"
        "    loss.backward()\n"
    )


def grad_scaler(device: str, init_scale: float, growth_interval: int | None = None) -> str:
    """Scale the loss dynamically, from ``init_scale`` on."""
    more = f", growth_interval={growth_interval}" if growth_interval is not None else ""
    return (
        f"import torch\n\n"
        f"scaler = torch.amp.GradScaler({device!r}, init_scale={init_scale!r}{more})\n\n"
        f"scaler.scale(loss).backward()\n"
        f"scaler.unscale_(optimizer)  # before any clipping\n"
        f"scaler.step(optimizer)\n"
        f"scaler.update()\n"
    )
