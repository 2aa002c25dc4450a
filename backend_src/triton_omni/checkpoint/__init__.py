# SPDX-License-Identifier: Apache-2.0
"""Facts and weights of a Qwen2.5-Omni checkpoint: configuration, speakers, strict loading, synthetic ones."""
