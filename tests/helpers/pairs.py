"""Student and teacher features, and the gradient of a loss of them."""

import torch


def pair(batch, d, noise=0.5, seed=0, dtype=torch.float64, mean=0.3):
    rng = torch.Generator().manual_seed(seed)
    teacher = torch.randn(batch, d, generator=rng, dtype=torch.float64) + mean
    student = teacher + noise * torch.randn(batch, d, generator=rng, dtype=torch.float64)
    return student.to(dtype), teacher.to(dtype)


def gradient(loss, student, teacher, autocast=False):
    student = student.detach().clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        value = loss(student, teacher)
    value.backward()
    return value.detach(), student.grad
