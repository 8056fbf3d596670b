"""The kernels that a step of the decoder is made of, by the names it calls them."""

from tutorial_engine.kernels.decode_attention import decode_attention as decode_attention
from tutorial_engine.kernels.gumbel_sample import gumbel_sample as gumbel_sample
from tutorial_engine.kernels.prefill_attention import cut_tiles as cut_tiles
from tutorial_engine.kernels.prefill_attention import max_tiles as max_tiles
from tutorial_engine.kernels.prefill_attention import prefill_attention as prefill_attention
from tutorial_engine.kernels.rms_norm import add_rms_norm as add_rms_norm
from tutorial_engine.kernels.rope_kv_write import rope_kv_write as rope_kv_write
from tutorial_engine.kernels.silu_mul import silu_mul as silu_mul
from tutorial_engine.kernels.top_k_top_p_sample import top_k_top_p_sample as top_k_top_p_sample
