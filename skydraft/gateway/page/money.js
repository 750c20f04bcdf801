// What each of the two models wrote of an answer, and what it cost.

/** `say` adds a line of words; an answer of an older gateway has only its cost. */
export function sayMoney(say, { usage, cost }) {
  if (!usage) {
    if (cost != null) say('meta.cost', { cost: cost.toPrecision(3) });
    return;
  }
  const { edge, cloud } = usage;
  if (!cloud.tokens_in) return; // no server was asked
  const counts = { edge: edge.completion_tokens, cloud: cloud.completion_tokens };
  const sent = { read: cloud.tokens_in, hit: cloud.tokens_hit, wrote: cloud.tokens_out };
  const price = cloud.cost == null ? {} : { cost: cloud.cost.toPrecision(3) };
  say(cloud.cost == null ? 'meta.split' : 'meta.money', { ...counts, ...sent, ...price });
}
