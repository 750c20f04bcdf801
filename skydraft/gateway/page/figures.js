// What the rounds of an answer add up to.

export const ORIGINS = ['accepted', 'recovered', 'bonus', 'skipped', 'edge', 'cloud', 'edge-fallback'];
export const OUTCOMES = ['verified', 'written', 'skipped', 'fallback'];
const BY_TARGET = ['verified', 'written'];

export class Figures {
  tokens = 0;
  calls = 0; // times that the device asked the large model and waited
  written = 0; // tokens that the large model wrote itself
  seconds = 0;
  audited = 0;
  agreed = 0;
  origins = {};
  rounds = [];
  firstMs = null;

  /** Counts the `skydraft` part of one chunk, which came `ms` after the request. */
  take(part, ms) {
    const tokens = part.num_tokens ?? 0;
    if (tokens && this.firstMs === null) this.firstMs = ms;
    this.tokens += tokens;
    if (tokens) this.seconds = ms / 1000;
    if (part.origin) this.origins[part.origin] = (this.origins[part.origin] ?? 0) + tokens;
    if (part.record) this.#round(part.record);
  }

  #round(record) {
    this.rounds.push(record);
    if (record.outcome === 'verified') this.calls += 1;
    if (BY_TARGET.includes(record.outcome)) this.written += record.num_committed - record.num_accepted;
    this.audited += record.num_audited ?? 0;
    this.agreed += record.num_agreed ?? 0;
  }

  /** The gateway's own figures are better than ours, which include the way to the browser. */
  settle(stats) {
    this.inexact = stats.exact === false && stats.num_requests > 0;
    this.adapter = stats.adapter;
    this.audits = stats.audits;
    this.cost = stats.num_requests > 0 ? stats.cost : null;
    if (stats.ttft_ms != null) this.firstMs = stats.ttft_ms;
    if (stats.tokens_per_s > 0) this.seconds = this.tokens / stats.tokens_per_s;
    if (stats.cloud_calls_per_token != null) this.calls = stats.cloud_calls_per_token * this.tokens;
    if (stats.target_written_per_token != null) this.written = stats.target_written_per_token * this.tokens;
  }

  get speed() {
    return this.seconds > 0 && this.tokens ? this.tokens / this.seconds : null;
  }

  get callsPerToken() {
    return this.tokens ? this.calls / this.tokens : null;
  }

  get writtenPerToken() {
    return this.tokens ? this.written / this.tokens : null;
  }

  get agreement() {
    return this.audited ? this.agreed / this.audited : null;
  }
}

export function sum(parts) {
  const total = new Figures();
  for (const part of parts) {
    for (const name of ['tokens', 'calls', 'written', 'seconds', 'audited', 'agreed']) total[name] += part[name];
    for (const [origin, tokens] of Object.entries(part.origins)) {
      total.origins[origin] = (total.origins[origin] ?? 0) + tokens;
    }
    total.rounds.push(...part.rounds);
    total.audits = part.audits ?? total.audits;
  }
  return total;
}

/** Tokens by origin in the order of the legend, those of an origin that we do not know at the end. */
export function shares(figures) {
  const known = [...ORIGINS, ...Object.keys(figures.origins).filter((origin) => !ORIGINS.includes(origin))];
  const counted = known.map((origin) => ({ origin, tokens: figures.origins[origin] ?? 0 }));
  return counted.map((each) => ({ ...each, share: figures.tokens ? each.tokens / figures.tokens : 0 }));
}

const number = (value, digits) => (value === null ? '–' : value.toFixed(digits));
const share = (value) => (value === null ? '–' : percent(value));

export const shown = {
  calls: (figures) => number(figures.callsPerToken, 2),
  written: (figures) => share(figures.writtenPerToken),
  speed: (figures) => number(figures.speed, 1),
  agreement: ({ agreement, agreed, audited }) => (audited ? `${percent(agreement)} (${agreed}/${audited})` : '–'),
  watched: (figures) => share(figures.audits?.agreement ?? null),
  tokens: (figures) => (figures.tokens ? String(figures.tokens) : '–'),
  rounds: (figures) => (figures.rounds.length ? String(figures.rounds.length) : '–'),
};

/** Whole percents; 100 and 0 only where they are exact. */
export function percent(share) {
  if (share > 0.99 && share < 1) return '>99%';
  if (share > 0 && share < 0.01) return '<1%';
  return `${Math.round(share * 100)}%`;
}
