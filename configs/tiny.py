# python train.py configs/tiny.py
#
# A model in about three minutes on two CPU cores: the Python standard library is the text,
# 4,096 BPE tokens the vocabulary.
params = "4M"
sequence_length = 256
global_batch_size = 32
max_steps = 120
warmup_ratio = 0.05
eval_interval = 50
eval_tokens = "100k"
sample_interval = 50
save_interval = 50
