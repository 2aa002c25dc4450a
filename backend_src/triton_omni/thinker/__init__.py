# SPDX-License-Identifier: Apache-2.0
"""The first stage: a client's request to text and hidden rows."""
