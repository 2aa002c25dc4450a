# SPDX-License-Identifier: Apache-2.0
"""Codec codes to waveform: flow matching (DiT) to mel frames, BigVGAN to samples, batched and streaming.

Everything here except the stage is plain torch, independent of Triton, vLLM and sessions. Letters in shapes: W windows,
N blocks, L layers, C codes, T mel frames, M mel channels, S samples, H hidden size.
"""
