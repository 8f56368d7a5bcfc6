"""A network over a mesh, whoever wrote its class: cut blocks, their attention, rows of the batch, stages."""
