"""The paper's Algorithm 2 as it is written: complement, generalised SVD, dense d x d kernel.

It is what `geodl` is measured against, and an oracle of the tests. Each step takes the best `torch.linalg` call there is for it. The only
correction is the factor 1/2 that Eq. 6 lacks.
"""

import torch
from torch import Tensor


def literal_kernel(p: Tensor, q: Tensor) -> Tensor:
    """Return the kernel Q (d, d) of the geodesic flow between orthonormal bases p, q: (d, n), by Algorithm 2."""
    n = p.shape[1]
    complement = torch.linalg.qr(p, mode="complete").Q[:, n:]  # line 1
    a, b = p.mT @ q, complement.mT @ q  # line 2
    # Line 3: a and b are the two blocks of a matrix with orthonormal columns, so their generalised SVD is the SVD of one of
    # them; the other one then has orthogonal columns, of lengths sin w.
    u1, cosines, v_t = torch.linalg.svd(a)
    turned = b @ v_t.mT
    u2 = -turned / torch.linalg.vector_norm(turned, dim=0).clamp(min=torch.finfo(p.dtype).tiny)
    w = torch.acos(cosines.clamp(-1, 1))  # line 4
    sinc = torch.sinc(2 * w / torch.pi)
    l1, l2, l3 = (1 + sinc) / 2, -torch.sin(w) * torch.sinc(w / torch.pi) / 2, (1 - sinc) / 2  # line 5
    delta_1, delta_2 = p @ u1, complement @ u2
    left = torch.cat([delta_1 * l1 + delta_2 * l2, delta_1 * l2 + delta_2 * l3], 1)
    return left @ torch.cat([delta_1, delta_2], 1).mT  # line 6


def literal_loss(student: Tensor, teacher: Tensor, dim: int = 127) -> Tensor:
    """Return the GeoDL loss (Eq. 9) of features: (batch, d) with the dense kernel as a constant."""
    new, old = (torch.nn.functional.normalize(z, dim=1) for z in (student, teacher))
    with torch.no_grad():
        bases = [torch.linalg.svd(z - z.mean(0), full_matrices=False).Vh[: min(dim, len(z) - 1)].mT for z in (old, new)]
        kernel = literal_kernel(*bases)
    new_k, old_k = new @ kernel, old @ kernel
    inner, new_norm, old_norm = (new_k * old).sum(1), (new_k * new).sum(1).sqrt(), (old_k * old).sum(1).sqrt()
    return (1 - inner / (new_norm * old_norm)).mean()
