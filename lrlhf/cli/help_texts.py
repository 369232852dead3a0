"""What ``lrlhf COMMAND --help`` shows: the options that most runs need, and the way to the rest.

Nothing that imports torch may be imported here, see `lrlhf.__main__`.
"""

from __future__ import annotations

_CONFIG = """\
  --config FILE               what to run; a later FILE overrides an earlier one
  --model.KEY VALUE           an option of the model, over what the files say
  --data.KEY VALUE            an option of the data"""
_CHECKPOINT = """\
  --ckpt_path PATH            the checkpoint; last and best are those of the run's own folder. Or
                              the folder of an exported model"""
_MORE = """\
more:
  lrlhf help LearnedReward                       what a class of lrlhf accepts, at any depth
  lrlhf fit --model.help RLOO                    what a class accepts: RLOO, PPO, RewardModel,
  lrlhf fit --data.help PromptDataModule         or the path of one of yours
  lrlhf fit --trainer.callbacks.help KLControl
  {everything:<46} every option of the command
"""
_EVALUATION = f"""\
options:
{_CONFIG}
{_CHECKPOINT}
  --trainer.limit_{{command}}_batches N
                              stop after N batches

{_MORE}"""

_TEXTS = {
    "fit": f"""\
usage: lrlhf fit --config FILE [--config OVERLAY ...] [--KEY VALUE ...]

Train a reward model or a policy: on rewards, on pairs, or on given texts.

options:
{_CONFIG}
  --trainer.max_steps N       stop after N iterations
  --trainer.default_root_dir DIR
                              the folder of the run; runs/<name of the first FILE> unless given
  --trainer.accelerator cpu, --trainer.devices 2, --trainer.strategy fsdp2
                              where it runs
  --ckpt_path last            continue where the run in this folder stopped; or the path of a
                              checkpoint
  --seed_everything N         the seed of everything random
  --print_config              write every option and its value to standard output, and stop
  --debug                     show tracebacks and what other libraries log

examples:
  lrlhf fit --config lrlhf:quickstart
  lrlhf fit --config lrlhf:quickstart --trainer.max_steps 20 --model.optimizer.lr 1e-5
  lrlhf fit --config lrlhf:quickstart --ckpt_path last

{_MORE}""",
    "launch": f"""\
usage: lrlhf launch --cluster FILE --config FILE [the options of lrlhf fit]

Run fit on a Ray cluster: trainers, rollout replicas and reward workers, started again where they
die. The run continues from the last checkpoint of its folder.

options:
  --cluster FILE              what to take of the cluster, as lrlhf:cluster/local
  --cluster.KEY VALUE         an option of it: --cluster.trainers.workers 4
{_CONFIG}

example:
  lrlhf launch --cluster lrlhf:cluster/local --config lrlhf:quickstart

{_MORE}""",
    "check": f"""\
usage: lrlhf check --config FILE [the options of lrlhf fit]

Look for mistakes in a config and its data, without loading weights.

options:
{_CONFIG}

example:
  lrlhf check --config lrlhf:quickstart

{_MORE}""",
    "audit": f"""\
usage: lrlhf audit --config FILE [--json FILE] [--html FILE] [the options of lrlhf fit]

Look for faults in all rows of the training and validation data: duplicates, contradictions, leaks,
biases, broken texts, bad images. Loads no weights, and changes nothing.

options:
{_CONFIG}
  --json FILE                 write all findings with all their rows
  --html FILE                 write a page of the findings

example:
  lrlhf audit --config lrlhf:reward_hh --data.train pairs.jsonl.gz --html audit.html

{_MORE}""",
    "plan": f"""\
usage: lrlhf plan --config FILE [--gpus N] [--gpu NAME] [the options of lrlhf fit]

Print the batch sizes, the steps and the memory of fit, without training, and with --gpu how long
an iteration takes, within a factor of two.

options:
{_CONFIG}
  --gpus N                    processes, whatever the config has
  --gpu NAME                  a100, h100, h200, b200 or l40s: its memory, and the time it takes
  --gpu-memory GIB            memory of each GPU; marks what does not fit
  --response-tokens MEAN      of a response, for times; half of the limit unless given

examples:
  lrlhf plan --config lrlhf:quickstart --gpus 2
  lrlhf plan --config lrlhf:ppo_text_7b --gpus 64 --gpu h100 --response-tokens 400

{_MORE}""",
    "validate": f"""\
usage: lrlhf validate --config FILE [--ckpt_path PATH] [--KEY VALUE ...]

Measure a model on the validation sets once, with intervals.

{_EVALUATION.replace("limit_{command}", "limit_val")}""",
    "test": f"""\
usage: lrlhf test --config FILE [--ckpt_path PATH] [--KEY VALUE ...]

Run the test set once.

{_EVALUATION}""",
    "predict": f"""\
usage: lrlhf predict --config FILE [--ckpt_path PATH] [--KEY VALUE ...]

Run the prediction set once.

{_EVALUATION}""",
    "export": f"""\
usage: lrlhf export --ckpt_path PATH --output DIR --config FILE [the options of lrlhf fit]

Write the model of a checkpoint as a folder that transformers loads.

options:
{_CONFIG}
  --ckpt_path PATH            the checkpoint
  --output DIR                the folder, which must not exist
  --use_ema true              the averaged weights instead of the last ones
  --license ID                licence for the model card, such as apache-2.0
  --push_to_hub OWNER/NAME    push the folder to the Hugging Face hub (token: HF_TOKEN)
  --private true              if the model is new there
  --revision BRANCH           instead of main

{_MORE}""",
    "reward": f"""\
usage: lrlhf reward RUN [--json FILE] [--html FILE]
       lrlhf reward --config FILE RESPONSES [--json FILE] [--html FILE] [the options of lrlhf fit]

Tell what rewards said in a run, from its rollouts.jsonl, or run the rewards of a config over a file
of responses: values, responses without one, variance within prompts, prompts without signal,
correlations with each other and with the length, time. Loads no policy. An audit: it raises no
alarm.

options:
  RUN                         the folder of a run
  RESPONSES                   rows with prompt and completion (or completions), or the
                              rollouts.jsonl of a run
{_CONFIG}
  --json FILE                 write all figures
  --html FILE                 write a page with charts (needs plotly)
  --prompts_per_call N        responses of so many prompts in one call; 1 unless given

examples:
  lrlhf reward runs/quickstart --html rewards.html
  lrlhf reward --config lrlhf:quickstart answers.jsonl

{_MORE}""",
    "convert": """\
usage: lrlhf convert [--to {{sharded,full}}] SOURCE TARGET

Turn a checkpoint's folder, as fsdp2 and DeepSpeed write it, into one file, or a file into a folder.
Any strategy and number of processes resumes from both.

options:
  SOURCE                      checkpoint to read
  TARGET                      checkpoint to write, which must not exist
  --to FORM                   sharded or full; what SOURCE is not, unless given
""",
    "replay": f"""\
usage: lrlhf replay DUMP [--trust_remote_code] [--config OVERLAY ...] [the options of lrlhf fit]

Repeat the step of a dump, and show where it goes wrong. The exit status is 0 when it goes wrong
again, 3 when it does not.

options:
  DUMP                        the folder that the run has written for the step
  --trust_remote_code         run the code of yours, or of a model, that the dump's config names
{_CONFIG}

{_MORE}""",
    "serve-reward": """\
usage: lrlhf serve-reward --model.source FOLDER [--KEY VALUE ...]

Serve a reward model that RewardModel trained, or any reward function, over HTTP.

options:
  --config FILE               these options as YAML
  --model.source FOLDER       a trained reward model
  --reward CLASS              a reward function instead, with --reward.KEY VALUE
  --host ADDRESS              address to listen at; 127.0.0.1 unless given
  --port N                    8100 unless given
  --token_env NAME            environment variable that holds the token of clients

example:
  lrlhf serve-reward --model.source runs/reward_text/export/final --port 8200

more:
  lrlhf serve-reward --reward.help NumericAnswer what a reward function accepts
  lrlhf serve-reward --help.all                  every option of the command
""",
}


def help_text(command: str) -> str | None:
    """Return the short help of a command; None: its own help is short."""
    text = _TEXTS.get(command)
    if text is None:
        return None
    return text.format(command=command, everything=f"lrlhf {command} --help.all")
