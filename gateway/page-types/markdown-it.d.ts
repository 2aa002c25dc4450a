// SPDX-License-Identifier: Apache-2.0
/** What the page uses of markdown-it, which index.html loads. */

interface MarkdownToken {
  type: string;
  tag: string;
}

interface MarkdownIt {
  core: { ruler: { push(name: string, rule: (state: { tokens: MarkdownToken[] }) => void): void } };
  disable(rules: string[]): this;
  render(text: string): string;
}

declare function markdownit(options: { html: boolean; breaks: boolean }): MarkdownIt;
