# SPDX-License-Identifier: Apache-2.0
"""The recipe of `mini`, the small trained checkpoint: data, training, export, judge; see README.md beside this file.

`python -m training` trains; nothing of the server imports this package.
"""
