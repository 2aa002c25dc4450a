# SPDX-License-Identifier: Apache-2.0
"""Carries rows and codes from one stage to the next, in messages of the ensemble or through a shared ring."""
