# SPDX-License-Identifier: Apache-2.0
"""LangChain: a chain that ends in a chat model, asked for a whole reply and for a stream."""

import json

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

prompt = ChatPromptTemplate.from_messages([("human", "What color is the {thing}?")])
chain = prompt | ChatOpenAI(model="qwen2_5_omni") | StrOutputParser()
pieces = list(chain.stream({"thing": "sky"}))
print(json.dumps({"text": chain.invoke({"thing": "sky"}), "streamed": "".join(pieces), "pieces": len(pieces)}))
