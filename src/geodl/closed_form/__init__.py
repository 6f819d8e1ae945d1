"""Learning in closed form: features of a frozen network, a random expansion, ridge regression. Pure functions on tensors.

The features of an image are *blocks* z_b of width d_b (maps of several stages, pooled to a grid), standardized and expanded to
    ``h_b = ReLU(W_b z_b / sqrt(d_b))``,  W_b (M_b x d_b) standard normal, fixed by a seed;  h = (h_1, h_2, ...), M = sum M_b.
One-hot targets y are fitted by ridge regression without an intercept. Where only sums are kept (*primal* form):
    ``G = sum h h'``, ``C = sum h y'``,  ``head = (G + lambda I)^-1 C``,  ``lambda = gamma tr(G) / M``,  scores ``h' head``.
The sums do not know in which order or in which phases the images came, so neither does the head. Where the features of all
images are kept (*dual* form), with ``K = H H'`` (N x N) and a weight w_i for each image, all 1 unless classes are balanced:
    ``A = (K + lambda W^-1)^-1``,  ``a = A Y``,  ``head = H' a``,  ``lambda = gamma tr(W K) / M``.
What the fit without some image would say of it needs no second fit (`leave_one_out`, `leave_out`): blocks and gamma are
chosen, temperature and threshold fitted on that, never on test images.

From features to h: `expansion`, `random_features`. Solving: `primal`, `dual`. Leave-one-out: `choices`, `offsets`, `novelty`, `doubts`,
`series`. Fits to images: `kept_features`, `sampled`; what is left of them: `fitted`.
"""
