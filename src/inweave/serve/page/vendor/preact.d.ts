export * from "preact";
export * from "preact/hooks";
export const html: (strings: TemplateStringsArray, ...values: any[]) => any;
