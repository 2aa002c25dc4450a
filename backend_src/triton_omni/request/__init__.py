# SPDX-License-Identifier: Apache-2.0
"""A client's request: bytes in, a checked and frozen request out."""
