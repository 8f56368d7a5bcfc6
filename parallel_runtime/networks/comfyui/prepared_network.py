"""Makes a network that ComfyUI has loaded one whose ranks share out its tokens, and whose blocks can be compiled."""

from __future__ import annotations

from torch import nn

from .agreed_scales import find_scales
from .attention_names import ask_the_split
from .blocks import Network
from .cut_blocks import cut_blocks
from .gguf_layers import use_gguf_kernels
from .quantised_layers import hide_quantised
from .token_split import TokenSplit


def prepare_network(network: nn.Module, data: Network, split: TokenSplit) -> None:
    """Change the network so, once; `split` says which ranks.

    Raises:
        UnsupportedModelError: it is not as the data says.
    """
    ask_the_split(data.attention_in)
    hide_quantised(network)
    find_scales(network, split)
    use_gguf_kernels(network)
    cut_blocks(network, data.blocks, split)
