# SPDX-License-Identifier: Apache-2.0
"""LangChain: a chain that ends in a chat model, asked for a whole reply and for a stream."""

import json

from address import KEY, URL
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

model = ChatOpenAI(base_url=URL, api_key=KEY, model="qwen2_5_omni")
prompt = ChatPromptTemplate.from_messages([("human", "What color is the {thing}?")])
chain = prompt | model | StrOutputParser()
pieces = list(chain.stream({"thing": "sky"}))
print(json.dumps({"text": chain.invoke({"thing": "sky"}), "streamed": "".join(pieces), "pieces": len(pieces)}))
