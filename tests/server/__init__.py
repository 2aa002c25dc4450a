# SPDX-License-Identifier: Apache-2.0
"""A package, so that its modules may be named as those of tests/unit are."""
