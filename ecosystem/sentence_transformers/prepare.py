"""Write a small model with random weights and its tokenizer."""

import torch
import transformers
from sentence_transformers import SentenceTransformer, models
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

words = Tokenizer(
    WordLevel({f"w{i}": i for i in range(40)} | {"[PAD]": 40, "[UNK]": 41}, unk_token="[UNK]")
)
words.pre_tokenizer = Whitespace()
torch.manual_seed(0)
config = transformers.BertConfig(
    vocab_size=42,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    hidden_dropout_prob=0,
    attention_probs_dropout_prob=0,
    pad_token_id=40,
)
transformers.BertModel(config).save_pretrained("bert")
transformers.PreTrainedTokenizerFast(
    tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", model_max_length=8
).save_pretrained("bert")
body = models.Transformer("bert")
SentenceTransformer(modules=[body, models.Pooling(16)]).save("tiny")
