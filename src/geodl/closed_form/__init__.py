"""Closed-form learning: features of a frozen network, random expansion, ridge regression. Pure functions on tensors.

The features of an image are *blocks* z_b of width d_b (maps of several stages, pooled to a grid), standardized and expanded to
    ``h_b = ReLU(W_b z_b / sqrt(d_b))``,  W_b (M_b x d_b) standard normal, fixed by a seed;  h = (h_1, h_2, ...), M = sum M_b.
Ridge regression without an intercept fits one-hot targets y. With sums only (*primal* form):
    ``G = sum h h'``, ``C = sum h y'``,  ``head = (G + lambda I)^-1 C``,  ``lambda = gamma tr(G) / M``,  scores ``h' head``.
The sums do not depend on the order of the images or on their phases, so neither does the head. With the features of all
images (*dual* form), ``K = H H'`` (N x N) and a weight w_i for each image, all 1 unless classes are balanced:
    ``A = (K + lambda W^-1)^-1``,  ``a = A Y``,  ``head = H' a``,  ``lambda = gamma tr(W K) / M``.
Leave-one-out predictions need no second fit (`leave_one_out`, `leave_out`). They choose blocks and gamma, and temperature
and threshold are fitted to them; test images are never used.

Modules: features to h: `expansion`, `random_features`; solvers: `primal`, `dual`; leave-one-out: `choices`, `offsets`, `novelty`,
`doubts`, `series`; fits to images: `kept_features`, `sampled`, `fitted`.
"""
