"""Which functions run in the format, which in float32, and which by the precision of their arguments.

The first two are the lists of `torch.autocast` on CUDA, with the losses of its list for the CPU, and with embeddings.
Functions are listed by name, since one has many aliases: `torch.matmul`, `Tensor.matmul`, `@`.
"""

PRODUCTS = frozenset(
    """
    linear bilinear matmul __matmul__ __rmatmul__ mm bmm mv addmm addmv addr addbmm baddbmm
    einsum tensordot inner chain_matmul linalg_multi_dot linalg_matmul linalg_vecdot
    conv1d conv2d conv3d conv_tbc convolution _convolution conv_transpose1d conv_transpose2d conv_transpose3d
    scaled_dot_product_attention
    rnn_tanh rnn_relu lstm gru rnn_tanh_cell rnn_relu_cell lstm_cell gru_cell
    """.split()
)
"""Sums of products: what tensor cores compute. Operands and results are rounded; the sums are float32."""

EMBEDDINGS = frozenset(["embedding", "embedding_bag"])
"""Rounded like products, but their results count as float32 afterwards, as in autocast. So the residual stream of a
transformer stays float32."""

HALF = frozenset(["prelu"])
"""Computed element by element, but in FP16 and BF16 even of float32 arguments, as products are."""

FLOAT32 = frozenset(
    """
    acos asin cosh erfinv exp expm1 log log10 log1p log2 logsumexp pow __pow__ __rpow__ reciprocal rsqrt sinh tan
    __rdiv__ __rtruediv__ softplus
    cumprod cumsum dist norm prod sum renorm cdist pdist cosine_similarity normalize
    linalg_norm linalg_vector_norm linalg_matrix_norm
    softmax softmin log_softmax layer_norm group_norm rms_norm native_layer_norm native_group_norm
    binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy ctc_loss gaussian_nll_loss
    hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss
    multilabel_margin_loss multilabel_soft_margin_loss nll_loss poisson_nll_loss smooth_l1_loss soft_margin_loss
    triplet_margin_loss triplet_margin_with_distance_loss
    grid_sample stft trace quantile nanquantile
    """.split()
)
"""Functions whose results are always float32: they need range or precision."""

LIKE_FIRST = frozenset(["batch_norm", "instance_norm"])
"""Functions whose result has the precision of their first argument, although their parameters are float32."""

LIKE_SECOND = frozenset(["to", "type_as"])
"""Methods whose result has the precision of their second argument, where that is a tensor."""

DECOMPOSED = frozenset(["multi_head_attention_forward"])
"""Python functions that contain several products, each of which must be rounded separately."""

OPERANDS = {"scaled_dot_product_attention": 3}
"""How many of a product's arguments are rounded, where not all are. A mask has -inf, which not every format has."""

NOT_OPERANDS = frozenset(["attn_mask", "out"])
"""Keyword arguments of products that are not rounded before."""
