# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni on NVIDIA Triton: three stages that stream text and speech. Start reading at `session/wire.py`."""
