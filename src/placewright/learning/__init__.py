"""The learned methods: a policy that proposes placements, and policy gradients that improve it."""
