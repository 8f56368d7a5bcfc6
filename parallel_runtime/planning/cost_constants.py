"""The constants of the cost model: each with its unit, and the file of benchmarks/results that it was fitted to.

The fitted ones follow what was measured on H200s; a test holds every prediction to within 20% of that, and another
sees that each constant counts in the results beside it. To refit them to faster steps or other sizes:

1. measure: `python -m benchmarks.compare --rivals ours`, and `--set pipefusion` with and without `--no-p2p`;
2. `python -m benchmarks.fit_cost` prints prediction beside measurement;
3. fit in the order of this file, each constant to the rows beside it (the GPU's own rates are in facts.py)."""

from __future__ import annotations

from ..requests.facts import GIB

PASSES = {
    True: 19,  # activations a token and block; compare.json: one GPU, 1024² and 2048²
    False: 130,  # activations a token and block; flux_step.json: one GPU, eager, 1024² and 2048²
}
"""What a block's elementwise kernels read and write, compiled or not."""
ROWS_LOST = 47  # rows; compare.json: one GPU, 1024² and 2048²
"""That a product's tiles waste, on average: 1152 rows a rank run at 658 of 685 TFLOP/s."""
BLOCK_SECONDS = {
    True: 20e-6,  # s a block; compare.json: one GPU, 512²
    False: 60e-6,  # s a block; flux_step.json: one GPU, eager, 512²
}
"""Of a block on a GPU, however few tokens it has: kernels that are too small to fill it. Compiled or not."""
STEP_SECONDS = 0.3e-3  # s a step; compare.json: one GPU, 512²
"""Of a step around the forward: sampler, launch."""
MEETING_SECONDS = 0.6e-3  # s a step; compare.json: several GPUs, 512²
"""Of a step on several ranks: they wait for the slowest."""
COLLECTIVE_SECONDS = 50e-6  # s an exchange; pipefusion_step.json: Ulysses without P2P
"""Of an exchange with NCCL instead of writes to peers: packing, the collective's launch, unpacking."""
PATCH_SECONDS = 2.6e-3  # s a patch; pipefusion_step.json: stages without P2P, 1024²
"""Of a patch in a stage on a GPU, however few tokens it has: the host's work between two recorded forwards."""
ROWS_OF_A_WAVE = 950  # rows; pipefusion_step.json: stages over NVLink
"""That products lose while a receive over NVLink waits: its kernel polls on multiprocessors, and the tiles that these
would have computed make one more wave. A wave covers 350 rows of FLUX.1's widest product and 1400 of its narrowest, 820
on average by time; a product of no more rows fits beside the receive, or takes twice as long, so that it loses half of
its rows. That this is the reason is a guess: no profile was taken."""
LIVE_ACTIVATIONS = 30  # activations a token; pipefusion_step.json: peaks of memory
"""That are alive at once: queries, keys, values, the MLP's four, inputs and outputs."""
EXCHANGE_BUFFERS = 8  # activations a token; pipefusion_step.json: peaks of memory of Ulysses
"""That are alive besides, where the tokens are split."""
CONTEXT_BYTES = 1.5 * GIB  # bytes; pipefusion_step.json: peaks of memory
"""CUDA's own, NCCL's buffers, workspaces of cuBLAS and cuDNN."""
CONTEXT_TO_COME = 0.5 * GIB  # bytes; estimated: what a load leaves free
"""Of that, what is not taken yet when ranks are asked what is free: they have CUDA's own."""
FEED_FORWARD = 2 / 3  # of a block's weights; counted: 8 of 12 times width²
"""In a block that attends and feeds forward from one input."""
SEEN_OF_EXCHANGE = 0.31  # of it; counted: a chunk of four and a piece, exchange/grown_memory.py
"""Of the way through the host's memory, however long attention hides it."""
SEEN_BESIDE = 0.06  # of it; counted: the way back of one chunk of four, a quarter of what travels
"""Of that where the block has a feed-forward layer to compute meanwhile."""
IN_PIECES = 1.25  # times; estimated, host_route.md: Z-Image, 2048²
"""That products of others' tokens take, as they come in pieces."""
INPUT_PASSES = 11  # queries, keys or values; estimated, host_route.md: Z-Image, 2048²
"""That norms, rotation and copies of others' keys and values read and write."""
LAST_OF_INPUT = 1 / 4  # of products; counted: a piece of four, exchange/host_gather.py
"""That make keys and values of others' tokens, what is left to do when the last piece of their input has come."""
ROUNDING_SECONDS = 28e-12  # s a number of an input; estimated, host_route.md: FLUX.1 int8, 1024²
"""That rounding an input to int8 for the others takes before the first of it leaves, and what came once it is there."""
MERGE_PASSES = 12  # activations a token and pass of the ring; counted, in float32
"""That a ring's log-sum-exp merge reads and writes."""
FLOAT32_SLOWDOWN = 6.0  # times; estimated
"""Of products and attention in float32."""
LATENT_BYTES = 256  # bytes a token; counted: 64 channels in float32
"""Of the latent, which CFG and data ranks gather."""
