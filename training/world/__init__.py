# SPDX-License-Identifier: Apache-2.0
"""The small world of English that `mini` knows: words, stories, chats, facts, pictures. All text is the project's own.

Pure Python: knows neither tensors nor tokens. `chats.chat` draws one chat; `speech.sentence` one sentence to be spoken.
"""
