"""Independent references in float64, as slow and as plain as can be."""

import numpy as np
import torch

FLOAT64_EPS = np.finfo(np.float64).eps


def random_orthogonal(rng, d):
    q, r = np.linalg.qr(rng.standard_normal((d, d)))
    return q * np.sign(np.diag(r))


class KnownFlow:
    """Two subspaces of R^d that meet at given angles by construction, and the geodesic between them."""

    def __init__(self, angles, d, seed=0):
        rng = np.random.default_rng(seed)
        self.angles = np.sort(np.asarray(angles, dtype=np.float64))
        n = len(self.angles)
        assert 2 * n <= d
        frame = random_orthogonal(rng, d)
        self.start, self.normal = frame[:, :n], frame[:, n : 2 * n]
        self.p = self.start @ random_orthogonal(rng, n)
        self.q = self.at(1.0) @ random_orthogonal(rng, n)

    def at(self, v):
        return self.start * np.cos(v * self.angles) + self.normal * np.sin(v * self.angles)

    def kernel(self, nodes=24):
        """Numerical integration of Pi(v) Pi(v)' over [0, 1] (Gauss-Legendre)."""
        x, weights = np.polynomial.legendre.leggauss(nodes)
        return sum(
            w / 2 * self.at((1 + v) / 2) @ self.at((1 + v) / 2).T
            for v, w in zip(x, weights, strict=True)
        )


def spectral_kernel(p, q):
    """g(PP' + QQ') with g(x) = 1/2 + 1/2 sign(x - 1) sinc(arccos|x - 1|), g(0) = 0."""
    x, vectors = np.linalg.eigh(p @ p.T + q @ q.T)
    w = np.arccos(np.clip(np.abs(x - 1), 0, 1))
    g = 0.5 + 0.5 * np.sign(x - 1) * np.sinc(w / np.pi)
    return (vectors * g) @ vectors.T


def principal_basis(z, dim, eps=FLOAT64_EPS, center=True):
    """All leading right singular vectors up to dim or the numerical rank."""
    rows = z - z.mean(0) if center else z
    _, s, vt = np.linalg.svd(rows, full_matrices=False)
    rank = int((s > max(z.shape) * eps * s[0]).sum())
    return vt[: min(dim, rank)].T


def geodesic_loss(student, teacher, dim, eps=FLOAT64_EPS, center=True):
    """The loss by a dense kernel and the textbook cosine."""
    new, old = (np.asarray(z, dtype=np.float64) for z in (student, teacher))
    new, old = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (new, old))
    p, q = (principal_basis(z, dim, eps, center) for z in (old, new))
    n = min(p.shape[1], q.shape[1])
    kernel = spectral_kernel(p[:, :n], q[:, :n])
    inner = np.einsum("id,de,ie->i", new, kernel, old)
    norms = [np.sqrt(np.einsum("id,de,ie->i", z, kernel, z)) for z in (new, old)]
    return float(np.mean(1 - inner / (norms[0] * norms[1])))


def literal_kernel(p, q):
    """The kernel Q (d, d) between orthonormal bases p, q: (d, n) by the paper's Algorithm 2 as it is written.

    Complement, generalized SVD, dense kernel. The only correction is the factor 1/2 that Eq. 6 lacks.
    """
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
    l1, l3 = (1 + sinc) / 2, (1 - sinc) / 2  # line 5
    l2 = -torch.sin(w) * torch.sinc(w / torch.pi) / 2
    delta_1, delta_2 = p @ u1, complement @ u2
    left = torch.cat([delta_1 * l1 + delta_2 * l2, delta_1 * l2 + delta_2 * l3], 1)
    return left @ torch.cat([delta_1, delta_2], 1).mT  # line 6
