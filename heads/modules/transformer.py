"""A layer of a transformer's encoder, which normalises after each residual, as `torch.nn.TransformerEncoderLayer`."""

from torch import Tensor, nn

from .dropout import Dropout


class TransformerLayer(nn.Module):
    """Attention of rows to each other and a perceptron, each added to its input and normalised.

    Args:
        dim: width D of the rows and of the perceptron's hidden layer.
        head_dim: width of a head; narrower rows have one head. ValueError where it does not divide a larger `dim`.
        dropout: share of the attention, of the hidden values and of both results that is zero while training.
    """

    def __init__(self, dim: int, head_dim: int, dropout: float) -> None:
        super().__init__()
        if dim % min(head_dim, dim):
            raise ValueError(f"heads of width {head_dim} do not divide rows of width {dim}: set head_dim")
        self.heads = max(1, dim // head_dim)
        self.project = nn.Linear(dim, 3 * dim)  # to queries, keys and values
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), Dropout(dropout), nn.Linear(dim, dim))
        self.dropout = Dropout(dropout)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        nn.init.xavier_uniform_(self.project.weight)
        nn.init.zeros_(self.project.bias)
        nn.init.zeros_(self.out.bias)

    def forward(self, rows: Tensor, bias: Tensor) -> Tensor:
        """Return the new rows of `rows [..., N, D]`; `bias [..., H or 1, N or 1, N]` is added to their scores."""
        projected = self.project(rows).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = projected.movedim(-3, 0).transpose(-3, -2).unbind()
        scores = queries @ keys.transpose(-2, -1) / keys.shape[-1] ** 0.5 + bias
        gathered = self.dropout(scores.softmax(-1).to(values.dtype)) @ values
        after_attention, after_mlp = self.norms
        rows = after_attention(rows + self.dropout(self.out(gathered.transpose(-3, -2).flatten(-2))))
        return after_mlp(rows + self.dropout(self.mlp(rows)))
