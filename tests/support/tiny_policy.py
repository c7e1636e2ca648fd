"""A tiny policy for engines on a CPU: a causal LM of two layers over 32 letters."""

from pathlib import Path

ALPHABET = "abcdefghijklmnopqrstuvwxyz012345"  # a token is a letter
VOCABULARY = len(ALPHABET)


def make(path: Path) -> str:
    """Trains it for seconds to follow the last two tokens of its text. Writes it with a tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    last, one_before = torch.randn(2, VOCABULARY, VOCABULARY) * 2
    text = torch.randint(VOCABULARY, (1024, 2))
    for _ in range(38):
        likely = (last[text[:, -1]] + one_before[text[:, -2]]).softmax(-1)
        text = torch.cat([text, torch.multinomial(likely, 1)], 1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for batch in text.repeat(3, 1).split(32):
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval().save_pretrained(path)
    letters = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(ALPHABET)}, unk_token="a"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(path)
    return str(path)
