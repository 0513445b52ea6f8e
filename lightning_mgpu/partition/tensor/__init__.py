"""Tensor parallelism, the pure half: what a recorded forward becomes when layers are split over ranks; no communication.

`plan` decides which parameters are split and how, `lower` rewrites a recording for one rank. The ideas are Megatron-LM's
(Shoeybi et al. 2019, section 3): a column layer, whose outputs are split, feeds a row layer, whose products are summed.
"""
