# SPDX-License-Identifier: Apache-2.0
"""A model of three stages that share a GPU, driven by the rules of `triton_omni.policy`."""
