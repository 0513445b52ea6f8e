"""The table of situations, by theme; each must train to the numbers that one device gives."""

from __future__ import annotations

from lightning_mgpu.examples import CNN
from tests.zoo import (
    ambient,
    batches,
    branches,
    buffers,
    crossing,
    data,
    gan,
    hf,
    loops,
    mutation,
    outputs,
    reuse,
    routing,
    steps,
    text,
    vision,
)
from tests.zoo.case import Case

VISION = (
    Case(CNN, data.digit_splits, num_stages=(2, 3), validate=True, predict=True),
    Case(vision.ResidualNet, data.small_images, num_stages=(2, 3)),
    Case(vision.UNet, data.image_pairs, num_stages=(2, 3, 4)),
    Case(vision.BatchNormFirst, data.small_images, num_microbatches=1, exact=True),
)

TEXT = (
    Case(text.EncoderDecoder, data.sentence_pairs, num_stages=(2, 3)),
    Case(text.KeywordArguments, data.padded_sentences),
    Case(text.RaggedTargets, data.ragged_sentences),
    Case(text.RaggedTargets, data.sentences_of_changing_length, variant="changing-length"),
    Case(text.LossInsideModel, data.ragged_sentences),
    Case(text.RecurrentReader, data.sentences),
    Case(text.AttentiveReader, data.sentences),
    Case(text.SequenceFirst, data.sentences),
)

BRANCHES = (
    Case(branches.MaskBranch, data.padded_sentences),
    Case(branches.LongestRow, data.rows_of_uneven_length),
    Case(branches.CallbackKnob, data.vectors, trainer=lambda: {"callbacks": [branches.GainSchedule()]}),
    Case(branches.EpochBranch, data.vectors, trainer=lambda: {"max_steps": 6}),
    Case(branches.TrainingBranch, data.vector_splits, trainer=lambda: {"max_steps": 6}, validate=True),
)

REUSE = (
    Case(reuse.TiedHead, data.sentences, num_stages=(2, 3)),
    Case(reuse.CalledTwice, data.vectors, num_stages=(2, 3)),
    Case(reuse.Siamese, data.vector_pairs),
    Case(reuse.BareParameter, data.vectors),
    Case(reuse.FunctionalBuffer, data.vectors),
)

CROSSING = (
    Case(crossing.IntegerAndBoolean, data.vectors, num_stages=(2, 3)),
    Case(crossing.IntegerAndBoolean, data.vectors, variant="named-cut", strategy={"cuts": ["fc3"]}),
    Case(crossing.LatePositions, data.sentences, num_stages=(2, 3)),
    Case(crossing.SameValueTwice, data.vectors, strategy={"cuts": ["right"]}),
)

MUTATION = (
    Case(mutation.InPlaceCalls, data.vectors, num_stages=(2, 3)),
    Case(mutation.MaskedAssignment, data.vectors, num_stages=(2, 3)),
    Case(mutation.SliceAssignment, data.vectors, num_stages=(2, 3)),
    Case(mutation.ViewsAcrossCut, data.vectors, strategy={"cuts": ["fc3"]}),
    Case(mutation.WrittenView, data.vectors),
    Case(mutation.InPlaceLayer, data.vectors, strategy={"cuts": ["relu"]}),
)

AMBIENT = (
    Case(ambient.FrozenTeacher, data.vectors, num_stages=(2, 3), untrained=("teacher",)),
    # Several microbatches would round several bfloat16 gradients where one device rounds their sum.
    Case(ambient.AutocastPart, data.vectors, num_microbatches=1, exact=True),
    Case(ambient.CustomGradient, data.vectors),
)

BUFFERS = (
    Case(buffers.MirroredWeight, data.vectors),
    Case(buffers.ReboundBuffer, data.vectors),
    Case(buffers.Codebook, data.vectors),
    Case(buffers.CallCounter, data.vectors),
)

ROUTING = (Case(routing.MixtureOfExperts, data.vectors),)

OUTPUTS = (
    Case(outputs.TupleOutput, data.vectors),
    Case(outputs.DictOutput, data.vectors),
    Case(outputs.DataclassOutput, data.vectors),
    Case(outputs.ModelOutputOutput, data.vectors),
)

STEPS = (
    Case(steps.Mlp, data.vectors, num_stages=(2, 3)),
    Case(steps.Mlp, data.noisy_vectors, variant="noisy-dataset"),
    Case(
        steps.Mlp,
        data.vectors,
        variant="accumulated-and-clipped",
        trainer=lambda: {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ),
    Case(steps.ChildModel, data.vectors),
    Case(steps.TwoChildren, data.vectors),
    Case(steps.LayersAroundModel, data.sentences, strategy={"module": "model"}),
    Case(steps.NoisyStep, data.vectors),
    Case(steps.Contrastive, data.vector_pairs),
    Case(steps.WeightPenalty, data.vectors),
    Case(steps.FrozenFirst, data.vectors, strategy={"cuts": ["fc2"]}, untrained=("fc1",)),
    Case(steps.FrozenLast, data.vectors, strategy={"cuts": ["fc3"]}, untrained=("fc3",)),
    Case(steps.AdamWMlp, data.vectors),
    Case(steps.ParameterGroups, data.vectors, num_stages=(2, 3)),
    Case(steps.StepReturnsDict, data.vectors),
    Case(steps.SkippedStep, data.vectors, trainer=lambda: {"max_steps": 4}),
    Case(gan.Gan, data.vector_pairs, trainer=lambda: {"max_steps": 6}),
    Case(
        loops.EveryLoop,
        data.vector_splits,
        num_stages=(2, 3),
        trainer=lambda: {"max_steps": 6},
        validate=True,
        predict=True,
    ),
)

TRANSFORMERS = (
    Case(hf.Gpt2, hf.texts_to_continue, num_stages=(2, 4)),
    Case(hf.Bert, hf.texts_to_classify),
    Case(hf.Llama, hf.texts_to_continue),
    Case(hf.T5, hf.texts_to_translate, num_stages=(2, 3)),
    Case(hf.Vit, hf.images_to_classify),
)

GENERAL = (
    *VISION,
    *TEXT,
    *BRANCHES,
    *REUSE,
    *CROSSING,
    *MUTATION,
    *AMBIENT,
    *BUFFERS,
    *ROUTING,
    *OUTPUTS,
    *STEPS,
    *TRANSFORMERS,
)

CONTAINERS = (
    Case(batches.DictBatches, batches.dict_batches),
    Case(batches.TupleBatches, batches.tuple_batches),
    Case(batches.NamedTupleBatches, batches.named_tuple_batches),
    Case(batches.DataclassBatches, batches.dataclass_batches),
    Case(batches.ListBatches, batches.list_batches),
)
